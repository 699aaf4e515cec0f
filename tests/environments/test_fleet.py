"""Real processes side by side: within the room, apart from each other, and none of them twice."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments.cell import Cell
from megacpp_validate.environments.fleet import (
    CONTEXT_MIB,
    Fleet,
    Need,
    Room,
    choose_next,
    expect_need,
    read_gpus,
    read_room,
)
from megacpp_validate.evidence.receipt import Outcome, Receipt
from megacpp_validate.evidence.store import read_receipt
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.process import Processes, Stopped
from tests.environments.places import make_probes

CPU, H200 = Target("cpu", ""), Target("h200", "sm_90")
SMALL = Need(0.0, 1.0)


def order(probe: str, stack: str = "te1") -> Order:
    return Order(probe, stack, CPU, "native", tool="tool 1", commit="c0", environment=f"of {stack}")


def cells(folder: Path, main: str, *names: tuple[str, str], limit_s: float = 60.0) -> list[Cell]:
    """Each (stack, probe), in an environment where a probe does what `main` says."""
    environment = make_probes(folder, main)
    return [Cell(environment, order(probe, stack), folder / stack, limit_s) for stack, probe in names]


def run(every: list[Cell], needs: list[Need] | None = None, room: Room | None = None, **more: object) -> list[Receipt]:
    fleet = Fleet(room or Room(2), **more)  # type: ignore[arg-type]
    return [ran.receipt for ran in fleet.run(list(zip(every, needs or [SMALL] * len(every), strict=True)), Processes())]


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
    said = [cell.log.read_text().split() for cell in every]
    assert [words[1] for words in said] == [cell.order.cell for cell in every]
    assert len({words[0] for words in said}) == len(every)
    assert not any(Path(words[0]).exists() for words in said)


WATCH = (
    "log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    "os.write(log, f'+{{order[\"probe\"]}} '.encode()); time.sleep(0.3)\n"
    "os.write(log, f'-{{order[\"probe\"]}} '.encode()); write()"
)


def test_the_budget_holds_for_real_processes_and_what_is_bigger_runs_alone(tmp_path: Path) -> None:
    log = tmp_path / "seen"
    memory = {"a": 600.0, "b": 500.0, "c": 400.0, "huge": 5000.0, "d": 100.0}
    every = cells(tmp_path, WATCH.format(log=str(log)), *(("te1", probe) for probe in memory))
    needs = [Need(mib, 9.0 - index) for index, mib in enumerate(memory.values())]
    assert all(receipt.outcome is Outcome.PASS for receipt in run(every, needs, Room(5, 1000.0)))
    running: set[str] = set()
    for word in log.read_text().split():
        running ^= {word[1:]}
        assert sum(memory[probe] for probe in running) <= 1000.0 or running == {"huge"}
    assert log.read_text().split()[0] in {"+a", "+c"}  # both are started at once, and "b" has to wait


def test_the_longest_is_started_first(tmp_path: Path) -> None:
    log = tmp_path / "seen"
    every = cells(tmp_path, WATCH.format(log=str(log)), *(("te1", probe) for probe in "abc"))
    run(every, [Need(0.0, 1.0), Need(0.0, 3.0), Need(0.0, 2.0)], Room(1))
    assert log.read_text().split() == ["+b", "-b", "+c", "-c", "+a", "-a"]


def test_one_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    log = tmp_path / "seen"
    every = cells(tmp_path, WATCH.format(log=str(log)), *(("te1", probe) for probe in "abcd"))
    run(every, [Need(0.0, 9.0, "same"), Need(0.0, 8.0, "same"), Need(0.0, 7.0, "same"), Need(0.0, 1.0)], Room(4))
    words = log.read_text().split()
    assert words.index("-a") < min(words.index("+b"), words.index("+c"))
    assert words.index("+d") < words.index("-a")


def test_an_older_receipt_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    every = cells(tmp_path, "write()", ("te1", "a"), ("te1", "b"))
    run(every)
    (tmp_path / "te1" / "te1-cpu-a.old.curve").touch()
    watching = cells(tmp_path, f"write(outcome='error', reason=str(os.listdir({str(tmp_path / 'te1')!r})))",
                     ("te1", "a"), ("te1", "b"))  # fmt: skip
    first, _ = run(watching, room=Room(1), fresh=True)
    assert first.outcome is Outcome.ERROR  # not what the first run wrote
    assert "te1-cpu-a.json" in first.reason
    assert not (tmp_path / "te1" / "te1-cpu-a.old.curve").exists()
    processes = Processes()
    with pytest.raises(Stopped):
        Fleet(Room(1), progress=lambda _: processes.stop()).run([(every[0], SMALL)], processes)
    assert read_receipt(every[0].place) == first


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


def test_each_gpu_belongs_to_one_cell_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "seen"
    main = WATCH.format(log=str(log)).replace('order["probe"]', 'os.environ["CUDA_VISIBLE_DEVICES"]')
    every = cells(tmp_path, main, *(("te1", probe) for probe in "abcd"))
    run(every, [Need(0.0, 9.0, gpus=1), Need(0.0, 8.0, gpus=1), Need(0.0, 7.0, gpus=2), Need(0.0, 6.0, gpus=9)],
        Room(4, gpus=("3", "5")))  # fmt: skip
    busy: list[str] = []
    for word in log.read_text().split():
        for gpu in word[1:].split(","):
            assert (gpu in busy) is (word[0] == "-")
            busy.remove(gpu) if word[0] == "-" else busy.append(gpu)
    assert "+3,5" in log.read_text()


def test_a_folder_that_cannot_be_written_stops_all(tmp_path: Path) -> None:
    every = cells(tmp_path, "time.sleep(600)", ("te1", "a"), ("te2", "b"))
    (tmp_path / "te2").write_text("")
    with pytest.raises(OSError, match="te2"):
        run(every)


def test_a_process_reaches_its_receipt_and_the_turnstile_by_what_it_shares(tmp_path: Path) -> None:
    """A container sees nothing else of the host."""
    (cell,) = cells(tmp_path, "write()", ("te1", "a"))
    shared: list[tuple[Path, ...]] = []

    class Watching:
        because = shown = identity = "watching"

        def call(self, module: str, *arguments: str, shares: tuple[Path, ...] = ()) -> object:
            shared.append(shares)
            assert Path(arguments[0]).is_relative_to(shares[0])
            return cell.environment.call(module, *arguments, shares=shares)

    gate = tmp_path / "gate" / "device"
    gate.parent.mkdir()
    run([replace(cell, environment=Watching(), order=replace(cell.order, turnstile=str(gate)))])  # type: ignore[arg-type]
    assert shared[0][1:] == (gate.parent,)
    assert not os.path.lexists(shared[0][0])


# --- which cell is started next, and what this machine has room for ---


def needs(*memory: float) -> list[Need]:
    return [Need(mib, 10.0) for mib in memory]


CHOICES: dict[str, tuple[list[Need], list[Need], Room, int | None]] = {
    "first": (needs(100, 100), [], Room(4, 1000), 0),
    "no-job-left": (needs(100), needs(100, 100), Room(2, 1000), None),
    "none-waits": ([], needs(100), Room(2, 1000), None),
    "fits-to-the-last-mib": (needs(400), needs(600), Room(2, 1000), 0),
    "does-not-fit": (needs(401), needs(600), Room(2, 1000), None),
    "the-next-that-fits": (needs(900, 401, 400, 10), needs(600), Room(2, 1000), 2),
    "bigger-than-all-waits-for-all": (needs(2000), needs(1), Room(2, 1000), None),
    "bigger-than-all-runs-alone": (needs(2000), [], Room(2, 1000), 0),
    "others-before-what-is-bigger-than-all": (needs(2000, 10), [], Room(2, 1000), 1),
    "none-beside-what-is-bigger-than-all": (needs(0), needs(2000), Room(2, 1000), None),
    "a-card-that-is-full": (needs(500, 100), [], Room(2, 0), 0),
    "a-gpu-of-its-own": ([Need(0, 9, gpus=2), Need(0, 1, gpus=1)], [Need(0, 9, gpus=1)], Room(3, gpus=("0", "1")), 1),
    "no-gpu-left": ([Need(0, 9, gpus=1)], [Need(0, 9, gpus=1)], Room(3, gpus=("0",)), None),
    "more-gpus-than-there-are-runs-alone": ([Need(0, 9, gpus=4)], [], Room(3, gpus=("0",)), 0),
    "memory-is-not-counted": (needs(10**9), needs(10**9), Room(2), 0),
}


@pytest.mark.parametrize(("waiting", "running", "room", "chosen"), CHOICES.values(), ids=CHOICES)
def test_which_cell_is_started(waiting: list[Need], running: list[Need], room: Room, chosen: int | None) -> None:
    assert choose_next(waiting, running, room) == chosen


MEMORY = st.one_of(st.integers(0, 3000), st.just(0)).map(float)
NEEDS = st.lists(st.builds(Need, MEMORY, st.integers(0, 60).map(float)), max_size=40)
ROOMS = st.builds(Room, st.integers(1, 16), st.one_of(st.none(), st.integers(0, 4000).map(float)))


def simulate(every: list[Need], room: Room) -> list[tuple[float, int, list[int]]]:
    """Run them on a clock of its own: when each was started, and beside which others."""
    waiting = sorted(range(len(every)), key=lambda index: -every[index].seconds)
    running: dict[int, float] = {}
    now, started = 0.0, []
    while waiting or running:
        while (found := choose_next([every[i] for i in waiting], [every[i] for i in running], room)) is not None:
            index = waiting.pop(found)
            running[index] = now + every[index].seconds
            started.append((now, index, [other for other in running if other != index]))
        assert running, "everything waits and nothing runs"
        now = min(running.values())
        running = {index: end for index, end in running.items() if end > now}
    return started


@given(NEEDS, ROOMS)
def test_every_cell_runs_once_and_never_over_budget(every: list[Need], room: Room) -> None:
    started = simulate(every, room)
    assert sorted(index for _, index, _ in started) == list(range(len(every)))
    for _, index, beside in started:
        assert len(beside) < room.jobs
        if room.memory_mib is not None and beside:
            assert sum(every[i].memory_mib for i in (index, *beside)) <= room.memory_mib


def test_what_a_cell_takes_is_what_its_row_says(catalog: Catalog) -> None:
    rows = {module.id: module for module in catalog.modules}
    wanted, row = Order("permute", "te2", H200, "te"), rows["permute"]
    assert expect_need(wanted, row) == Need(row.gpu_memory_mib + CONTEXT_MIB, row.seconds, "te2/permute")
    assert not expect_need(wanted, rows["imports"]).kernels
    assert expect_need(replace(wanted, only_times=True), row).seconds < row.seconds


@pytest.mark.parametrize(
    ("script", "room", "gpus"),
    [("echo '143771, 143000'", Room(3, 143000 - 0.05 * 143771), ("143771",)),
     ("echo '143771, 100'", Room(3, 0.0), ("143771",)), ("echo '[N/A], [N/A]'", Room(1), ("[N/A]",)),
     ("echo 'NVIDIA-SMI has failed'; exit 9", Room(1), ()), ("exit 0", Room(1), ())],
    ids=["an-h200", "taken-by-another", "shared-with-the-host", "no-driver", "silent"],
)  # fmt: skip
def test_the_room_that_nvidia_smi_reports(script: str, room: Room, gpus: tuple[str, ...], tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "asked"}\n{script}\n')
    smi.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert read_gpus(path) == gpus
    chosen = {**path, "CUDA_VISIBLE_DEVICES": "3,1"}
    assert read_room(chosen, gpu=True, jobs=3) == room
    assert "--id=3" in (tmp_path / "asked").read_text()
    assert read_room(chosen, gpu=True, jobs=3, memory_mib=9000) == Room(3, 9000)
    assert read_room({"PATH": "/nowhere"}, gpu=True, jobs=3) == Room(1)
    assert read_room({"PATH": "/nowhere"}, gpu=False, jobs=3) == Room(3)
    assert read_gpus({"CUDA_VISIBLE_DEVICES": "3, -1,1"}) == ("3", "1")
