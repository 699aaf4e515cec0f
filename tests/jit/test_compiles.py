"""Ranks compile a kernel once: also where they are killed, hang, or have no place for locks."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock

from megacpp_validate.jit.compiles import MISSED, Guard

COMPILING = Path(__file__).parent / "compiling.py"
KEYS, PROCESSES, KILLED = 40, 4, 8


def start(folder: Path, seed: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(COMPILING), str(folder), str(seed), str(KEYS)])


def test_every_key_is_compiled_by_one_process_at_a_time_whoever_is_killed(tmp_path: Path) -> None:
    draw, killed = random.Random(0), 0
    (tmp_path / "go").touch()
    processes = [start(tmp_path, seed) for seed in range(PROCESSES)]
    deadline = time.monotonic() + 60
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(draw.uniform(0.02, 0.08))
        place = draw.randrange(PROCESSES)
        if killed < KILLED and (tmp_path / "log").exists() and processes[place].poll() is None:
            processes[place].kill()
            processes[place].wait()
            killed += 1
            processes[place] = start(tmp_path, PROCESSES + killed)
    assert killed >= KILLED // 2
    assert [process.returncode for process in processes] == [0] * PROCESSES
    said = Counter((tmp_path / "log").read_text().splitlines())
    assert len(list(tmp_path.glob("*.kernel"))) == KEYS
    assert [line for line in said if line.startswith("overlap")] == []
    assert sum(said.values()) <= KEYS + killed  # what was killed before its kernel was in the cache is made again


def nothing() -> object:
    return MISSED


def test_a_holder_that_hangs_is_waited_for_so_long_and_no_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = Guard(tmp_path, wait_s=0.1)
    hanging = threading.Thread(target=lambda: (FileLock(tmp_path / "key").acquire(), held.set(), over.wait(60)))
    held, over = threading.Event(), threading.Event()
    hanging.start()
    try:
        assert held.wait(5)
        assert guard.once("key", nothing, lambda: "compiled here") == "compiled here"
        assert guard.once("key", nothing, lambda: "again") == "again"
    finally:
        over.set()
        hanging.join()
    (note,) = guard.notes  # reported once
    assert "has been compiling for over 0.1 s (MEGACPP_JIT_WAIT_S)" in note
    assert capsys.readouterr().err.count("has been compiling") == 1
    assert guard.waited >= 0.2


def test_what_a_compile_raises_is_its_own_and_the_key_is_free_again(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    with pytest.raises(ZeroDivisionError):
        guard.once("key", nothing, lambda: 1 / 0)
    with FileLock(tmp_path / "key", timeout=0):
        pass
    assert guard.once("key", nothing, lambda: guard.once("key", nothing, lambda: 3)) == 3  # inside itself
    assert guard.notes == []


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "locks").write_text("a file, where a folder should be")
    guard = Guard(tmp_path / "locks")
    assert [guard.once(key, nothing, lambda: 7) for key in ("a", "b")] == [7, 7]
    assert len(guard.notes) == 1
    assert "this process compiles for itself" in capsys.readouterr().err
