"""Ranks are started, watched and ended; who died or hangs is named with its last collective, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # a test runs this file's `run` in a process of its own
from megacpp_validate.training.parallel.collective_record import read_record
from megacpp_validate.training.parallel.launch import Limits, RunEnd, WrongLaunch, launch
from megacpp_validate.training.parallel.rank_process import PortInUse, reserve_port
from tests.running_processes import processes_of

pytestmark = pytest.mark.thorough

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
ENOUGH = Limits(whole=60, silent=40)


def run(what: str, folder: Path, *, ranks: int = 2, limits: Limits = ENOUGH, port: int = 0) -> RunEnd:
    paths = os.pathsep.join([str(HERE), str(ROOT)])
    return launch(
        "launched_rank", [what], ranks=ranks, folder=folder, limits=limits, port=port, environment={"PYTHONPATH": paths}
    )


def test_ranks_that_end_well_leave_receipts_and_logs(tmp_path: Path) -> None:
    (tmp_path / "rank-5.json").write_text("{}")  # of an earlier run, with more ranks
    end = run("gloo-fine", tmp_path)
    assert end.ending == "done", end.words
    assert end.words == ""
    assert [rank.receipt for rank in end.ranks] == [
        {"rank": rank, "total": [1.0, 1.0, 1.0], "world": 2, "local": rank} for rank in range(2)
    ]
    assert [rank.log.read_text().splitlines()[-1] for rank in end.ranks] == ["total [1.0, 1.0, 1.0]"] * 2
    assert not (tmp_path / "rank-5.json").exists()
    record = read_record(tmp_path / "rank-0.collectives")
    assert record.step == 1
    assert [(one.operation, one.group, one.number) for one in record.collectives] == [
        ("broadcast", (0, 1), 2),
        ("all_reduce", (0,), 1),
    ]
    assert record.last is not None
    assert record.last.shape == "float32[3]"


def test_a_killed_rank_is_named_and_the_others_are_not(tmp_path: Path) -> None:
    end = run("gloo-killed", tmp_path)
    assert (end.ending, end.culprits) == ("died", (1,)), end.words
    assert "At fault: rank 1." in end.words
    assert "rank 1 ended by SIGKILL; last collective: all_reduce float32[3] #1 of ranks 0, 1 (left)" in end.words
    assert end.ranks[0].last is not None
    assert end.ranks[0].last.operation == "broadcast"
    assert processes_of(tmp_path) == []


def test_a_rank_that_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    end = run("alone-hangs", tmp_path, limits=Limits(whole=60, silent=1))
    assert (end.ending, end.culprits) == ("hung", (1,)), end.words
    assert "rank 1 was ended; last collective: all_reduce float32[4] #1 of ranks 0, 1 (left)" in end.words
    assert "no rank gave a sign of life for 1 s" in end.words
    assert "launched_rank.py" in end.words  # where rank 1 stood
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("alone-raises", "rank 2 ended by exit status 1; last collective: all_reduce float32[4] #1 of ranks 0, 1, 2"),
        ("alone-raises", "(left); ValueError: a planted fault"),
        ("alone-exits", "rank 2 ended by exit status 7"),
        ("alone-leaves-children", "rank 2 ended by SIGKILL"),
    ],
)
def test_who_dies_is_named_and_nothing_is_left(tmp_path: Path, what: str, said: str) -> None:
    end = run(what, tmp_path, ranks=3, limits=Limits(20, 20, grace=0.2))
    assert (end.ending, end.culprits) == ("died", (2,)), end.words
    assert said in end.words
    assert "rank 0 was ended; last collective: barrier #2 of ranks 0, 1, 2 (inside)" in end.words
    assert end.seconds < 15
    assert end.ranks[0].step == 3
    assert processes_of(tmp_path) == []


def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    end = run("alone-never-joins", tmp_path, limits=Limits(20, 20, joining=1.5))
    assert (end.ending, end.culprits) == ("hung", (1,)), end.words
    assert "not every rank had joined after 1.5 s" in end.words
    assert processes_of(tmp_path) == []


def test_a_run_that_moves_but_is_late_accuses_nobody(tmp_path: Path) -> None:
    end = run("alone-slow", tmp_path, limits=Limits(1.2, 1.0))
    assert (end.ending, end.culprits) == ("late", ()), end.words
    assert "was not done after 1.2 s" in end.words
    assert processes_of(tmp_path) == []


def test_a_rank_without_a_receipt_is_no_success(tmp_path: Path) -> None:
    end = run("alone-forgets", tmp_path)
    assert (end.ending, end.culprits) == ("no-receipt", (1,))
    assert "rank 1 ended well and left no receipt" in end.words


def test_a_port_in_use_is_told_before_a_rank_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 cannot be had.*pass port 0"):
            run("alone-fine", tmp_path, port=port)
    assert list(tmp_path.iterdir()) == []
    with reserve_port(port) as again:
        assert again.getsockname()[1] == port


@pytest.mark.parametrize(("ranks", "limits"), [(0, ENOUGH), (1, Limits(1, 2)), (1, Limits(1, 0))])
def test_what_cannot_be_launched_is_refused(tmp_path: Path, ranks: int, limits: Limits) -> None:
    with pytest.raises(WrongLaunch):
        run("alone-fine", tmp_path, ranks=ranks, limits=limits)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]; from pathlib import Path; from test_launch import run; "
        "run('alone-waits', Path(sys.argv[3]))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script, str(HERE), str(ROOT), str(tmp_path)])
    records = [tmp_path / f"rank-{rank}.collectives" for rank in range(2)]
    wait_for(lambda: all((one := read_record(path).last) and one.state == "inside" for path in records))
    assert len(processes_of(tmp_path)) == 2 * (2 + 2)  # a rank, its guard, its children
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: processes_of(tmp_path) == [])


def test_a_rank_ends_with_a_guard_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MEGACPP_RUN_FOLDER": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT)])
    module = "megacpp_validate.training.parallel.rank_start"
    guard = subprocess.Popen([sys.executable, "-m", module, "launched_rank", "alone-hangs"], env=environment)
    wait_for(lambda: len(processes_of(tmp_path)) == 2)
    wait_for((tmp_path / "rank-0.collectives").exists)
    guard.kill()
    guard.wait()
    wait_for(lambda: processes_of(tmp_path) == [])


def test_nothing_starts_for_a_launcher_that_is_gone(tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MEGACPP_LAUNCHER_PID": "1"}
    module = "megacpp_validate.training.parallel.rank_start"
    done = subprocess.run(
        [sys.executable, "-m", module, "launched_rank"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "the launcher is gone\n")


def wait_for(happened) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)
