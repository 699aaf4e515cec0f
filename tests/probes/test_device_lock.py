"""The lock of a device between real processes: many compute, one times alone, nobody starves, the dead hold none."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.probes.process import alone, computing

CODE = """
import os, sys, time
from megacpp_validate.probes.process import alone, computing
how, path, patience = sys.argv[1:4]
with (alone if how == "alone" else computing)(path, float(patience)) as held:
    print(held, flush=True)
    if how == "forking" and os.fork() == 0:
        os.execvp("sleep", ["sleep", "8"])
    sys.stdin.readline()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts a process that holds the lock until it gets a line."""
    started: list[Any] = []

    def begin(how: str, patience: float = 20.0) -> Any:
        command = [sys.executable, "-c", CODE, how, str(tmp_path / "room"), str(patience)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def holds(process: Any) -> bool:
    return bool(process.stdout.readline().strip() == "True")


def end(process: Any) -> None:
    process.communicate("\n")


def test_many_compute_and_one_times_alone(start: Any, tmp_path: Path) -> None:
    first, second = start("computing"), start("computing")
    assert holds(first)
    assert holds(second)
    with alone(str(tmp_path / "room"), 0.05) as held:
        assert not held
    end(first)
    end(second)
    with alone(str(tmp_path / "room"), 5.0) as held:
        assert held
        assert not holds(start("computing", 0.05))


def test_newcomers_wait_behind_who_waits_to_time(start: Any, tmp_path: Path) -> None:
    first = start("computing")
    assert holds(first)
    timing = start("alone")
    time.sleep(1.0)  # until it waits
    with computing(str(tmp_path / "room"), 0.1) as held:
        assert not held
    end(first)
    assert holds(timing)


@pytest.mark.parametrize("how", ["alone", "forking"])
def test_who_is_killed_holds_nothing_nor_do_its_children(start: Any, tmp_path: Path, how: str) -> None:
    process = start(how)
    assert holds(process)
    process.kill()
    process.wait()
    with alone(str(tmp_path / "room"), 5.0) as held:
        assert held


def test_a_lock_that_cannot_be_made_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"), computing(str(tmp_path / "none" / "room")):
        pass
