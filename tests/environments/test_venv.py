"""The CPU stack: made once, whole or not at all, whatever is killed and when."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from megacpp_validate.environments import venv
from megacpp_validate.environments.plan import LOCK_HASH
from megacpp_validate.environments.venv import CPU_VARIABLE, cpu_interpreter, make_cpu_stack
from megacpp_validate.errors import NoEnvironment


def test_another_lock_is_another_stack_and_a_failure_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, place, made = tmp_path / "cpu.txt", tmp_path / "stack", list[str]()

    def install(folder: Path, _: object) -> None:
        with pytest.raises(Timeout):  # another process waits meanwhile
            FileLock(f"{folder}.lock", timeout=0).acquire()
        folder.mkdir()
        made.append(lock.read_text())
        if made[-1] == "fails":
            raise NoEnvironment("the index does not answer")

    monkeypatch.setattr(venv, "_CPU_LOCK", lock)
    monkeypatch.setattr(venv, "_install_cpu_stack", install)
    for text in ("one", "one", "two"):
        lock.write_text(text)
        assert make_cpu_stack(place) == place / "bin" / "python"
    lock.write_text("fails")
    for _ in range(2):
        with pytest.raises(NoEnvironment, match="the index does not answer"):
            make_cpu_stack(place)
    assert made == ["one", "two", "fails", "fails"]


def test_a_pip_that_fails_is_reported_with_its_own_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venv.sys, "executable", "/bin/sh")  # `sh -m venv` fails
    with pytest.raises(NoEnvironment, match=r"cannot be made: /bin/sh -m venv .* failed \(exit\): .*Next step"):
        make_cpu_stack(tmp_path / "stack")


def test_only_what_runs_in_the_cpu_stack_carries_the_hash_of_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv, "make_cpu_stack", lambda _: sys.executable)
    user = {CPU_VARIABLE: str(tmp_path), "PATH": os.defpath}
    assert len(cpu_interpreter(user).variables[LOCK_HASH]) == 64
    assert cpu_interpreter({**user, LOCK_HASH: "of an image"}).variables[LOCK_HASH] == "of an image"
    assert LOCK_HASH not in cpu_interpreter(user, sys.executable).variables
    assert LOCK_HASH not in os.environ
