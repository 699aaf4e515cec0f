"""Real processes side by side: within the room, apart from each other, and none of them twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.environments.cell import Cell
from megacpp_validate.environments.fleet import Room, read_gpus, run_here
from megacpp_validate.evidence.receipt import Outcome, Receipt
from megacpp_validate.evidence.store import read_receipt
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.process import Processes, Stopped
from tests.environments.places import make_probes

CPU = Target("cpu", "")


def cells(folder: Path, main: str, *names: tuple[str, str]) -> list[Cell]:
    """Each (stack, probe), in an environment where a probe does what `main` says."""
    environment = make_probes(folder, main)
    orders = [Order(probe, stack, CPU, "native", tool="t", commit="c", environment=stack) for stack, probe in names]
    return [Cell(environment, order, folder / order.stack, 60.0) for order in orders]


def run(every: list[Cell], room: Room | None = None, **more: Any) -> list[Receipt]:
    return [ran.receipt for ran in run_here(every, room or Room(2), Processes(), **more)]


def test_cells_of_two_stacks_have_nothing_in_common(tmp_path: Path) -> None:
    """One dies and one hangs: no other is red by it; each has a working folder and a log of its own."""
    main = (
        "open('dropped', 'x').close()\nprint(os.getcwd(), cell, flush=True)\n"
        "if cell == 'te1-cpu-b': os.abort()\nif cell == 'te2-cpu-b': time.sleep(600)\nwrite()"
    )
    every = cells(tmp_path, main, *((stack, probe) for stack in ("te1", "te2") for probe in "abc"))
    every = [replace(cell, limit_s=4.0) if cell.order.cell == "te2-cpu-b" else cell for cell in every]
    receipts = run(every, room=Room(6))
    assert [receipt.cell for receipt in receipts] == [cell.order.cell for cell in every]
    assert [receipt.outcome.value for receipt in receipts] == ["pass", "error", "pass", "pass", "timeout", "pass"]
    words = [cell.log.read_text().split() for cell in every]
    assert [word[1] for word in words] == [cell.order.cell for cell in every]
    assert len({word[0] for word in words}) == len(every)
    assert not any(Path(word[0]).exists() for word in words)


WATCH = (
    "log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    "os.write(log, f'+{{order[\"probe\"]}} '.encode()); time.sleep(0.3)\n"
    "os.write(log, f'-{{order[\"probe\"]}} '.encode()); write()"
)


def test_the_longest_is_started_first(tmp_path: Path) -> None:
    log = tmp_path / "seen"
    every = cells(tmp_path, WATCH.format(log=str(log)), *(("te1", probe) for probe in "abc"))
    run([replace(cell, seconds=long) for cell, long in zip(every, (1.0, 3.0, 2.0), strict=True)], Room(1))
    assert log.read_text().split() == ["+b", "-b", "+c", "-c", "+a", "-a"]


def test_each_gpu_belongs_to_one_cell_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "seen"
    main = WATCH.format(log=str(log)).replace('order["probe"]', 'os.environ["CUDA_VISIBLE_DEVICES"]')
    every = cells(tmp_path, main, *(("te1", probe) for probe in "abcd"))
    needs = ((9.0, 1), (8.0, 1), (7.0, 2), (6.0, 9))
    every = [replace(cell, seconds=long, gpus=gpus) for cell, (long, gpus) in zip(every, needs, strict=True)]
    run(every, Room(4, ("3", "5")))
    busy: list[str] = []
    for word in log.read_text().split():
        for gpu in word[1:].split(","):
            assert (gpu in busy) is (word[0] == "-")
            busy.remove(gpu) if word[0] == "-" else busy.append(gpu)
    assert "+3,5" in log.read_text()


def test_an_older_receipt_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    every = cells(tmp_path, "write()", ("te1", "a"))
    run(every)
    (tmp_path / "te1" / "te1-cpu-a.old.curve").touch()
    watching = f"write(outcome='error', reason=str(os.listdir({str(tmp_path / 'te1')!r})))"
    (first,) = run(cells(tmp_path, watching, ("te1", "a")), room=Room(1), fresh=True)
    assert first.outcome is Outcome.ERROR  # not what the first run wrote
    assert "te1-cpu-a.json" in first.reason
    assert "te1-cpu-a.old.curve" in first.reason
    assert not (tmp_path / "te1" / "te1-cpu-a.old.curve").exists()
    processes = Processes()
    with pytest.raises(Stopped):
        run_here(every, Room(1), processes, progress=lambda _: processes.stop())
    assert read_receipt(every[0].place) == first
    (kept,) = run_here(every, Room(1), Processes(), fresh=False)
    assert (kept.receipt, kept.reused) == (first, True)


RETRIED = (
    "n = len(os.listdir({0!r})); open({0!r} + '/' + str(n), 'x').close()\n"
    "os.kill(os.getpid(), 9) if n < {1} else write()"
)


@pytest.mark.parametrize(("faults", "outcome"), [(0, "pass"), (2, "pass"), (3, "not-run")])
def test_what_somebody_killed_is_run_again_and_counted(faults: int, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "tries").mkdir()
    (cell,) = cells(tmp_path, RETRIED.format(str(tmp_path / "tries"), faults), ("te1", "a"))
    (receipt,) = run([cell], retries=2)
    assert (receipt.outcome.value, len(receipt.retries)) == (outcome, faults)
    assert all(fault.startswith("killed: ") for fault in receipt.retries)
    assert read_receipt(cell.place) == receipt


def test_a_cell_that_took_too_long_runs_again_alone_before_it_counts(tmp_path: Path) -> None:
    log = tmp_path / "seen"
    slow = f"time.sleep(600 if order['probe'] == 'a' and open({str(log)!r}).read().count('+a') < 2 else 0.3)"
    every = cells(
        tmp_path, WATCH.format(log=str(log)).replace("time.sleep(0.3)", slow), *(("te1", one) for one in "abc")
    )
    every = [replace(cell, limit_s=limit) for cell, limit in zip(every, (6.0, 60.0, 60.0), strict=True)]
    receipts = run(every)
    assert [receipt.outcome.value for receipt in receipts] == ["pass", "pass", "pass"]
    assert [fault.partition(" ")[0] for fault in receipts[0].retries] == ["timeout:"]
    assert log.read_text().endswith("+a -a ")


def test_a_folder_that_cannot_be_written_stops_all(tmp_path: Path) -> None:
    every = cells(tmp_path, "time.sleep(600)", ("te1", "a"), ("te2", "b"))
    (tmp_path / "te2").write_text("")
    with pytest.raises(OSError, match="te2"):
        run(every)


def test_the_gpus_that_a_process_would_see(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    for script, gpus in (("printf '0\\n1\\n'", ("0", "1")), ("echo 'NVIDIA-SMI has failed'; exit 9", ())):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        assert read_gpus({"PATH": f"{tmp_path}:/usr/bin:/bin"}) == gpus
    assert read_gpus({"PATH": "/nowhere"}) == ()
    assert read_gpus({"CUDA_VISIBLE_DEVICES": "3, -1,1"}) == ("3", "1")
