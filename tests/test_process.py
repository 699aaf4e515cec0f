"""A process ends in time, with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate import process_guard
from megacpp_validate.process import Call, Ended, Processes, Stopped, run_command
from tests.running_processes import is_running, within

THIS = os.environ | {"LANG": "C.UTF-8"}
PYTHON = (sys.executable, "-c")


def run(words: Sequence[str], folder: Path, processes: Processes | None = None, **more: Any) -> Ended:
    call = Call(tuple(words), THIS, tuple(more.pop("cleanup", ())))
    given = {"limit_s": 60.0, "log": folder / "log", **more}
    return (processes or Processes()).run(call, folder=folder, **given)


@pytest.mark.parametrize(
    ("script", "limit_s", "how", "code"),
    [
        ("sleep 600 & echo $!; wait", 1.0, "killed after 1 s", None),
        ("sleep 600 & echo $!", 60.0, "exit", 0),
        ("sleep 600 & echo $!; exit 3", 60.0, "exit", 3),
        ("sleep 600 & echo $!; kill -9 $$", 60.0, "signal 9", -9),
    ],
    ids=["limit", "ends well", "red", "killed"],
)
def test_what_a_process_started_ends_with_it(
    script: str, limit_s: float, how: str, code: int | None, tmp_path: Path
) -> None:
    """And what would outlive a process that did not end well, as a container does, is removed."""
    ended = run(["sh", "-c", script], tmp_path, limit_s=limit_s, cleanup=["touch", str(tmp_path / "cleaned")])
    assert (ended.how, ended.code) == (how, code)
    assert within(10, lambda: not is_running(int(ended.words)))
    assert (tmp_path / "cleaned").exists() is (code != 0)


LEAVES = """
import os, subprocess, sys, time
if sys.argv[1] == "daemon":  # whose parent is gone before the command is
    subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['setsid', 'sleep', '600'])"])
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("limit_s", "sleeps"), [(60.0, "0"), (2.0, "600")], ids=["ended", "killed"])
@pytest.mark.parametrize("kind", ["worker", "daemon"])
def test_what_left_the_process_group_is_killed_too(kind: str, limit_s: float, sleeps: str, tmp_path: Path) -> None:
    """As a pool of compile workers with a session of its own, which would go on holding memory of the GPU."""
    marked = Call((*PYTHON, LEAVES, kind, sleeps), {**THIS, "MEGACPP_TEST_MARK": str(tmp_path)})
    Processes().run(marked, folder=tmp_path, limit_s=limit_s, log=tmp_path / "log")
    assert within(5, lambda: not find_marked(str(tmp_path)))


def find_marked(mark: str) -> list[int]:
    """Processes that run with a variable of a test."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"MEGACPP_TEST_MARK={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:
            continue
    return [pid for pid in found if is_running(pid)]


def test_a_stop_ends_what_runs_and_starts_nothing(tmp_path: Path) -> None:
    processes = Processes()
    timer = threading.Timer(0.5, processes.stop)
    timer.start()
    with pytest.raises(Stopped, match="while this process ran"):
        run(["sleep", "600"], tmp_path, processes)
    timer.join()
    with pytest.raises(Stopped, match="before"):
        run(["true"], tmp_path, processes)


def test_variables_and_words_arrive_as_they_are(tmp_path: Path) -> None:
    """More of them than a socket takes at once, and bytes that are no text."""
    odd = os.fsdecode(b"half \xc3 a letter")
    script = (
        "import os, sys; os.write(1, os.environb[b'ODD'] + b'%d' % len(os.environb[b'LONG']) + sys.argv[1].encode())"
    )
    call = Call((*PYTHON, script, "a\nb"), {**THIS, "ODD": odd, "LONG": "x" * 120_000})
    Processes().run(call, folder=tmp_path, limit_s=60.0, log=tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == b"half \xc3 a letter120000a\nb"


def test_a_process_that_hangs_is_asked_where_and_not_what_it_started(tmp_path: Path) -> None:
    script = (
        "import faulthandler, subprocess, sys, time\nfaulthandler.enable()\n"
        "if len(sys.argv) == 1: subprocess.Popen([sys.executable, __file__, 'child'])\n"
        "def hang(): time.sleep(600)\nhang()"
    )
    (tmp_path / "script.py").write_text(script)
    ended = run([sys.executable, str(tmp_path / "script.py")], tmp_path, limit_s=4.0, ask_where=True)
    assert ended.code is None
    assert ended.words.count("in hang") == 1


CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
TOOL = """
import os, sys
from pathlib import Path
from megacpp_validate.process import Call, Processes
folder = Path(sys.argv[1])
call = Call((sys.executable, "-c", sys.argv[2]), os.environ)
Processes().run(call, folder=folder, limit_s=600.0, log=folder / "log")
"""


def test_a_tool_that_is_killed_outright_takes_all_that_it_started_with_it(tmp_path: Path) -> None:
    """The process, what that started in turn, and the container behind it: nobody is left to end them."""
    tool = subprocess.Popen([*PYTHON, TOOL, str(tmp_path), CHILD], cwd=Path(__file__).parents[1])
    assert within(30, lambda: len(read_pids(tmp_path / "log")) == 2)
    started = read_pids(tmp_path / "log")
    assert all(is_running(pid) for pid in started)
    tool.send_signal(signal.SIGKILL)
    tool.wait()
    assert within(10, lambda: not any(is_running(pid) for pid in started))


def read_pids(log: Path) -> list[int]:
    words = log.read_text() if log.exists() else ""
    return [int(word) for word in words.split()] if words.endswith("\n") else []


@pytest.mark.parametrize("words", ["", '{"words": ["touch", "started"], '], ids=["nothing", "half"])
def test_a_tool_that_is_killed_before_its_order_is_whole_starts_nothing(words: str, tmp_path: Path) -> None:
    ours, its = socket.socketpair()
    with ours, its:
        command = [sys.executable, "-I", "-S", str(process_guard.__file__), str(its.fileno())]
        process = subprocess.Popen(command, pass_fds=[its.fileno()], cwd=tmp_path)
        its.close()
        ours.sendall(words.encode())
        ours.close()
        assert process.wait(timeout=30) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_guard_that_is_killed_is_a_process_that_died(tmp_path: Path) -> None:
    script = "import os, time; print(os.getpid(), flush=True); os.kill(os.getppid(), 9); time.sleep(600)"
    ended = run([*PYTHON, script], tmp_path)
    assert (ended.how, ended.code) == ("signal 9", -9)
    assert within(5, lambda: not is_running(int((tmp_path / "log").read_text())))


def test_a_command_is_given_its_input_and_its_streams_are_read(tmp_path: Path) -> None:
    script = "cat; echo wrong >&2; pwd; echo $ONE; exit 2"
    apart = run_command(
        ["sh", "-c", script], limit_s=60, given=b"in\n", folder=tmp_path, variables={"ONE": "1"}, apart=True
    )
    assert (apart.code, apart.words, apart.errors) == (2, f"in\n{tmp_path}\n1\n", "wrong\n")
    assert apart.last_words == "wrong"
    whole = run_command(["sh", "-c", "cat; echo wrong >&2"], limit_s=60, given=b"x" * 3_000_000)
    assert (len(whole.words), whole.errors) == (3_000_006, "")
    assert run_command(["cat"], limit_s=60).last_words == "nothing"
    assert run_command(["sleep", "600"], limit_s=1).code is None
    missing = run_command([str(tmp_path / "none")], limit_s=60)
    assert (missing.code, "No such file" in missing.last_words) == (127, True)
