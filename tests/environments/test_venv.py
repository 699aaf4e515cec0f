"""The CPU stack: made once, whole or not at all, whatever is killed and when."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacpp_validate.environments import venv
from megacpp_validate.environments.venv import make_cpu_stack
from megacpp_validate.errors import NoEnvironment

# Writes half of an environment, reports it, and waits to be let on.
BUILDER = """
import sys, time
from pathlib import Path
from megacpp_validate.environments import venv

place, runs, go = map(Path, sys.argv[1:])

def install(folder, wanted):
    folder.mkdir()
    (folder / "first").write_text("1")
    (runs / str(time.monotonic_ns())).touch()
    while not go.exists():
        time.sleep(0.01)
    (folder / "second").write_text("2")

venv._install_cpu_stack = install
print(venv.make_cpu_stack(place))
"""


def start(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "runs").mkdir(exist_ok=True)
    words = [sys.executable, "-c", BUILDER, *(str(tmp_path / name) for name in ("env", "runs", "go"))]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def wait_for_runs(tmp_path: Path, count: int) -> None:
    end = time.monotonic() + 30
    while len(list((tmp_path / "runs").iterdir())) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_who_waits_for_a_build_that_is_killed_builds_it_and_others_get_it(tmp_path: Path) -> None:
    first = start(tmp_path)
    wait_for_runs(tmp_path, 1)
    others = [start(tmp_path) for _ in range(3)]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_for_runs(tmp_path, 2)
    (tmp_path / "go").touch()
    place = tmp_path / "env"
    assert {other.communicate(timeout=60)[0].strip() for other in others} == {str(place / "bin" / "python")}
    assert {file.name for file in place.iterdir()} == {"first", "second", "installed"}
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_another_lock_is_another_stack_and_a_failure_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, place, made = tmp_path / "cpu.txt", tmp_path / "stack", list[str]()

    def install(folder: Path, _: object) -> None:
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
