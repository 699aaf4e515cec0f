"""Ranks as processes: each failure is told with its rank and its words, and no process is left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacpp_validate.probes.fp8.amax_rank import run_ranks
from tests.running_processes import is_running


def command(text: str) -> list[str]:
    return [sys.executable, "-I", "-c", f"import json, os, subprocess, sys, time\nrank = json.load(sys.stdin)\n{text}"]


def ranks(text: str, count: int = 2, seconds: float = 20.0) -> list[str]:
    return list(run_ranks(command(text), [str(rank) for rank in range(count)], seconds=seconds))


def test_ranks_that_end_well() -> None:
    assert ranks("print('much to say')", 3) == ["", "", ""]


def test_the_rank_that_fails_is_told_with_its_words_and_ends_the_others() -> None:
    start = time.monotonic()
    one, two = ranks("if rank == 1: raise ValueError('the shard is not mine')\ntime.sleep(60)")
    assert time.monotonic() - start < 10
    assert one == "ended, because another rank failed; it said: nothing"
    assert two.startswith("exit code 1")
    assert "ValueError: the shard is not mine" in two


def test_a_rank_that_is_killed_is_told() -> None:
    assert ranks("if rank == 0: os.kill(os.getpid(), 9)")[0] == "exit code -9: nothing"


def test_ranks_that_all_fail_are_all_told() -> None:
    found = ranks("sys.exit(f'rank {rank} sees no device')")
    assert [f"rank {rank} sees no device" in fault for rank, fault in enumerate(found)] == [True, True]


def test_what_hangs_is_ended_at_the_deadline_with_what_it_said() -> None:
    start = time.monotonic()
    one, two = ranks("print('waits for rank 1', flush=True)\ntime.sleep(60 * (rank == 0))", seconds=1.5)
    assert time.monotonic() - start < 10
    assert one == "not done after 1.5 s; it said: waits for rank 1"
    assert two == ""


def test_nothing_that_a_rank_started_is_left(tmp_path: Path) -> None:
    place = str(tmp_path / "pids")
    text = (
        f"child = subprocess.Popen(['sleep', '60'])\nopen({place!r} + str(rank), 'w').write(str(child.pid))\n"
        "if rank == 0: sys.exit(3)\ntime.sleep(60)"
    )
    ranks(text)
    pids = [int(Path(f"{place}{rank}").read_text()) for rank in (0, 1) if Path(f"{place}{rank}").exists()]
    assert pids
    for _ in range(100):
        if not any(map(is_running, pids)):
            break
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_ranks_are_ended_where_the_wait_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    from megacpp_validate.probes.fp8 import amax_rank as module

    def interrupted(running: list[object], _: float) -> None:
        started.extend(rank.pid for rank in running)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks("time.sleep(60)")
    assert len(started) == 2
    assert not any(map(is_running, started))


def test_the_environment_is_added_to_this_one() -> None:
    program = command("assert os.environ['MEGACPP_RANK_TEST'] == 'there' and os.environ['PATH']")
    results = run_ranks(program, ["0"], seconds=20, environment={"MEGACPP_RANK_TEST": "there"})
    assert results == ("",)


def test_ranks_end_with_who_started_them_however_that_ends(tmp_path: Path) -> None:
    """Killed, it cannot end them."""
    place = str(tmp_path / "pid")
    rank = (
        "from megacpp_validate.probes.fp8.amax_rank import end_with_who_started_it\nend_with_who_started_it()\n"
        f"import os, time\nopen({place!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    starter = (
        "import sys\nfrom megacpp_validate.probes.fp8.amax_rank import run_ranks\n"
        f"run_ranks([sys.executable, '-c', {rank!r}], ['0'], seconds=60)"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    for _ in range(400):
        if Path(place).exists() and Path(place).read_text():
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    pid = int(Path(place).read_text())
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.05)
    assert not is_running(pid)
