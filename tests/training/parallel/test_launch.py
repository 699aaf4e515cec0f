"""torchrun's ranks are watched and ended; who died or hangs is named with its last collective, and no rank is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # a test runs this file's `run` in a process of its own
from megacpp_validate.training.parallel.launch import Limits, RunEnd, judge, launch, read_end
from megacpp_validate.training.parallel.ranks import Collective, RankRecord, read_record
from tests.running_processes import processes_of

pytestmark = pytest.mark.thorough

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
PATHS = os.pathsep.join([str(HERE), str(ROOT)])
ENOUGH = Limits(whole=100, silent=60)
Launcher = subprocess.Popen[str]


def run(what: str, folder: Path, *, ranks: int = 2, limits: Limits = ENOUGH) -> RunEnd:
    return launch("launched_rank", [what], ranks=ranks, folder=folder, limits=limits, environment={"PYTHONPATH": PATHS})


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_end_well_leave_receipts_and_logs(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "rank-5.json").write_text("{}")  # of an earlier run, with more ranks
    end = run("fine", tmp_path, ranks=ranks)
    assert end.ending == "done", end.words
    assert end.words == ""
    total = [float(sum(range(ranks)))] * 3
    assert [rank["receipt"] for rank in end.ranks] == [
        {"rank": rank, "total": total, "world": ranks, "local": rank} for rank in range(ranks)
    ]
    assert all(f"total {total}\n" == (tmp_path / f"rank-{rank}.stdout.log").read_text() for rank in range(ranks))
    assert not (tmp_path / "rank-5.json").exists()
    record = read_record(tmp_path / "rank-0.collectives")
    assert record.step == 3
    assert [(one.operation, one.group, one.number) for one in record.collectives] == [
        ("all_reduce", tuple(range(ranks)), 2),
        ("all_reduce", (0,), 1),
    ]
    assert record.last is not None
    assert record.last.shape == "float32[3]"


QUICK = Limits(whole=100, silent=2)
LATE = Limits(100, 100, joining=12)


@pytest.mark.parametrize(
    ("what", "ranks", "limits", "ending", "words"),
    [
        ("leaves-child", 4, ENOUGH, "died", ["{last} ended by SIGKILL; last collective: {first} (left)"]),
        ("hangs", 2, QUICK, "hung", ["no rank gave a sign of life for 2 s", "launched_rank.py"]),  # where it stood
        ("hangs", 4, QUICK, "hung", ["{last} was ended; last collective: {first} (left)",
            "rank 0 was ended; last collective: all_reduce float32[3] #2 of ranks 0, 1, 2, 3 (inside)"]),
        ("raises", 2, ENOUGH, "died", ["{last} ended by exit status 1; last collective: {first} (left); "
            "ValueError: a planted fault"]),
        ("exits", 2, ENOUGH, "died", ["{last} ended by exit status 7"]),
        ("never-joins", 2, LATE, "hung", ["not every rank had joined after 12 s"]),
    ],
)  # fmt: skip
def test_the_last_rank_is_named_and_the_others_are_not(
    tmp_path: Path, what: str, ranks: int, limits: Limits, ending: str, words: list[str]
) -> None:
    end, last = run(what, tmp_path, ranks=ranks, limits=limits), ranks - 1
    assert (end.ending, end.culprits) == (ending, (last,)), end.words
    first = f"all_reduce float32[3] #1 of ranks {', '.join(map(str, range(ranks)))}"
    for one in [f"At fault: rank {last}.", *words]:
        assert one.format(last=f"rank {last}", first=first) in end.words
    assert processes_of(tmp_path) == []


def test_a_rank_without_a_receipt_is_no_success(tmp_path: Path) -> None:
    end = run("forgets", tmp_path)
    assert (end.ending, end.culprits) == ("no-receipt", (1,))
    assert "rank 1 ended well and left no receipt" in end.words


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_ranks_end_with_what_started_them(tmp_path: Path, victim: str) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]; from pathlib import Path; from test_launch import run; "
        "run('hangs', Path(sys.argv[3]))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script, str(HERE), str(ROOT), str(tmp_path)])
    wait_for(lambda: all(read_record(tmp_path / f"rank-{rank}.collectives").step == 3 for rank in range(2)))
    ranks = {read_record(tmp_path / f"rank-{rank}.collectives").pid for rank in range(2)}
    (agent,) = set(processes_of(tmp_path)) - ranks
    os.kill(launcher.pid if victim == "launcher" else agent, signal.SIGKILL)
    wait_for(lambda: processes_of(tmp_path) == [])
    launcher.wait(60)


# --- two hosts: two launchers on this machine


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(folder: Path, port: int, what: str, *options: str, ranks: int = 1, hosts: int = 2) -> Launcher:
    words = [sys.executable, "-m", "megacpp_validate.training.parallel", "--nnodes", str(hosts)]
    words += ["--nproc-per-node", str(ranks), "--folder", str(folder), "--rdzv-endpoint", f"127.0.0.1:{port}"]
    given = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    given["PYTHONPATH"] = PATHS
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    return subprocess.Popen([*words, *options, "launched_rank", what], env=given, text=True, **pipes)


def finish(*launchers: Launcher) -> tuple[list[int], list[str]]:
    words = [launcher.communicate(timeout=100)[1] for launcher in launchers]
    return [launcher.returncode for launcher in launchers], words


def run_two(folder: Path, what: str, *options: str, ranks: int = 1) -> tuple[list[int], list[str]]:
    port = free_port()
    return finish(*[start(folder, port, what, *options, ranks=ranks) for _ in range(2)])


def test_two_hosts_reduce_together_and_receipts_are_gathered(tmp_path: Path) -> None:
    codes, words = run_two(tmp_path, "fine", ranks=2)
    assert codes == [0, 0], words
    end = read_end(tmp_path)
    assert end is not None
    assert [rank["receipt"] for rank in end.ranks] == [
        {"rank": rank, "total": [6.0] * 3, "world": 4, "local": rank % 2} for rank in range(4)
    ]
    assert len(list(tmp_path.glob("host-*.json"))) == 2
    assert processes_of(tmp_path) == []
    codes, words = run_two(tmp_path, "fine")
    assert codes == [2, 2]
    assert all("holds the end of a run" in one for one in words), words


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_host_that_is_lost_or_stopped_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    port = free_port()
    launchers = [start(tmp_path, port, "hangs") for _ in range(2)]
    records = [tmp_path / f"rank-{rank}.collectives" for rank in (0, 1)]
    wait_for(lambda: all(read_record(path).step == 3 for path in records))
    pid = int(read_record(records[1]).host.rpartition("-")[2])
    os.kill(pid, number)
    codes, words = finish(*launchers)
    ended = dict(zip([launcher.pid for launcher in launchers], zip(codes, words, strict=True), strict=True))
    code, text = next(value for other, value in ended.items() if other != pid)
    assert code == 1
    if number == signal.SIGKILL:
        assert "a host left no report" in text
        assert "At fault: rank 1." in text
    else:
        assert "the launcher got SIGTERM or SIGINT" in text
        assert ended[pid][0] == 1
    wait_for(lambda: processes_of(tmp_path) == [])


def test_a_host_that_never_comes_is_reported_before_a_rank_starts(tmp_path: Path) -> None:
    (launcher,) = [start(tmp_path, free_port(), "fine", "--joining-s", "3")]
    codes, words = finish(launcher)
    assert codes == [6], words
    assert "torchrun started no rank" in words[0]
    assert "not all 2 host(s) reached the rendezvous" in words[0]
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.parametrize(
    ("ending", "first", "second", "culprits"),
    [
        ("died", (1, "raised", 1.0), (-9, "left", 2.0), (1,)),  # rank 0 lost rank 1
        ("died", (1, "left", 1.0), (1, "left", 2.0), (0,)),
        ("died", (1, "raised", 1.0), (1, "raised", 2.0), (1,)),  # rank 1 is behind
        ("hung", (None, "inside", 0.0), (None, "left", 0.0), (1,)),
        ("late", (None, "inside", 0.0), (None, "left", 0.0), ()),
    ],
)
def test_the_rank_at_fault_follows_from_its_traces(ending: Any, first: Any, second: Any, culprits: Any) -> None:
    rows, records = [], {}
    for rank, (code, state, failed_at) in enumerate((first, second)):
        last = Collective("all_reduce", (0, 1), 2 - rank, state, "", 1.0)
        records[rank] = RankRecord(1.0, 0, (last,), 7, "host", steps=True)
        row = {"rank": rank, "code": code, "failed_at": failed_at, "fault": "", "last": ""}
        rows.append({**row, "receipt": None, "log": "nowhere"})
    assert judge(ending, rows, records, ENOUGH, 1.0).culprits == culprits
