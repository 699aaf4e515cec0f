"""The process below process 1 of a container: signals reach it once, orphans are buried, and its end is ours."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAITS = (
    "import os, sys; from megacpp_validate.images.entry import child; "
    "sys.exit(getattr(child, sys.argv[1])(sys.argv[2:], os.environ))"
)


@contextmanager
def run_child_of(*words: str, how: str = "run_child") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WAITS, how, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("script", "code"), [("exit 4", 4), ("kill -9 $$", 6)])
def test_the_end_of_the_verb_is_the_end_of_the_container(script: str, code: int) -> None:
    with run_child_of("sh", "-c", script) as process:
        assert process.wait(timeout=30) == code


@pytest.mark.parametrize(
    ("number", "cause"),
    [(9, "memory ran out"), (11, "compiled code crashed"), (15, "a process of this"), (40, "a process of this")],
)
def test_who_was_killed_is_spoken_for(number: int, cause: str, capfd: pytest.CaptureFixture[str]) -> None:
    with run_child_of("sh", "-c", f"kill -{number} $$") as process:
        assert process.wait(timeout=30) == 6
    assert f"Likely cause: {cause}" in capfd.readouterr().err


def test_docker_stop_reaches_the_verb() -> None:
    with run_child_of("sh", "-c", "trap 'exit 9' TERM; echo up; while :; do sleep 0.05; done") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 9
    with run_child_of("sh", "-c", "echo up; exec sleep 60") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 130, "stopped by whoever asked: interrupted"


def test_orphans_are_buried() -> None:
    """A verb whose own child outlives it: process 1 gets it, and waits for the verb all the same."""
    with run_child_of("sh", "-c", "(sleep 0.2 &) ; exit 4") as process:
        assert process.wait(timeout=30) == 4


@pytest.mark.parametrize(
    ("script", "number", "code"),
    [
        ("echo up; exec sleep 60", signal.SIGTERM, 130),  # docker stop, of a command that process 1 would be deaf for
        ("echo up; exec sleep 60", signal.SIGUSR1, 138),
        ("trap 'exit 7' USR1; echo up; while :; do sleep 0.05; done", signal.SIGUSR1, 7),
        ("echo up; kill -SEGV $$", 0, 139),
        ("echo up; exit 3", 0, 3),
    ],
)
def test_any_other_command_hears_signals_and_ends_as_itself(script: str, number: int, code: int) -> None:
    with run_child_of("sh", "-c", script, how="run_command") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        if number:
            process.send_signal(number)
        assert process.wait(timeout=30) == code


COUNTS = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print("up", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(len(seen))
"""


def test_a_key_of_a_terminal_is_heard_once() -> None:
    """The terminal sends it to every process in front of it; passed on besides, it would cut short a clean end."""
    code = f"import sys; sys.argv[1:] = ['run_command', sys.executable, '-c', {COUNTS!r}]; {WAITS}"
    child, terminal = pty.fork()
    if not child:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", code])
    try:
        while b"up" not in os.read(terminal, 100):
            pass
        os.write(terminal, b"\x03")
        _, status = os.waitpid(child, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1
