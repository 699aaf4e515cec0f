"""A process ends in time, with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate import process_guard as guard
from megacpp_validate.process import Call, Ended, NotStarted, Processes, Stopped
from tests.running_processes import is_running, within

THIS = os.environ | {"LANG": "C.UTF-8"}


def run(words: Sequence[str], folder: Path, processes: Processes | None = None, **more: Any) -> Ended:
    call = Call(tuple(words), THIS, tuple(more.pop("ends", ())))
    given = {"limit_s": 60.0, "log": folder / "log", **more}
    return (processes or Processes()).run(call, folder=folder, **given)


def test_what_a_process_started_is_killed_with_it(tmp_path: Path) -> None:
    ended = run(["sh", "-c", "sleep 600 & echo $!; wait"], tmp_path, limit_s=1.0)
    assert ended.how == "killed after 1 s"
    assert ended.code is None
    grandchild = int(ended.words)
    deadline = time.monotonic() + 10
    while is_running(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(grandchild)


def test_a_process_that_leaves_a_child_behind_is_not_waited_for(tmp_path: Path) -> None:
    script = "import subprocess\nprint('done', subprocess.Popen(['sleep', '600']).pid)"
    ended = run([sys.executable, "-c", script], tmp_path)
    done, child = ended.words.split()
    assert (ended.how, ended.code, done) == ("exit", 0, "done")
    assert ended.seconds < 30
    assert within(5, lambda: not is_running(int(child)))


LEAVES = """
import os, subprocess, sys, time
if sys.argv[1] == "daemon":  # whose parent is gone before the command is
    subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['setsid', 'sleep', '600'])"])
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(worker.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("limit_s", "sleeps"), [(60.0, "0"), (2.0, "600")], ids=["ended", "killed"])
@pytest.mark.parametrize("kind", ["worker", "daemon"])
def test_what_left_the_process_group_is_killed_too(kind: str, limit_s: float, sleeps: str, tmp_path: Path) -> None:
    """As a pool of compile workers with a session of its own, which would go on holding memory of the GPU."""
    words = [sys.executable, "-c", LEAVES, kind, sleeps]
    marked = Call(tuple(words), {**THIS, "MEGACPP_TEST_MARK": str(tmp_path)})
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


def test_of_a_process_that_writes_without_end_the_last_words_are_kept(tmp_path: Path) -> None:
    """All of it stays in the log; the tool must not hold it in memory."""
    script = "import os\nfor _ in range(40): os.write(1, b'x' * 2**18)\nos.write(1, b'last')"
    ended = run([sys.executable, "-c", script], tmp_path)
    assert (tmp_path / "log").stat().st_size > 10 * 2**20
    assert ended.words.endswith("xlast")
    assert len(ended.words) <= 2**20


def test_how_a_process_ended_that_was_stopped_is_not_told(tmp_path: Path) -> None:
    processes = Processes()
    timer = threading.Timer(0.5, processes.stop)
    timer.start()
    with pytest.raises(Stopped, match="while this process ran"):
        run(["sleep", "600"], tmp_path, processes)
    timer.join()


def test_a_process_reads_what_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("an order")
    assert run(["cat"], tmp_path, given=tmp_path / "given").words == "an order"
    assert run(["cat"], tmp_path).words == ""


def test_nothing_is_started_after_a_stop(tmp_path: Path) -> None:
    processes = Processes()
    processes.stop()
    with pytest.raises(Stopped):
        run([sys.executable, "-V"], tmp_path, processes)


def test_variables_and_words_arrive_as_they_are(tmp_path: Path) -> None:
    """More of them than a socket takes at once, and bytes that are no text."""
    odd = os.fsdecode(b"half \xc3 a letter")
    script = (
        "import os, sys; os.write(1, os.environb[b'ODD'] + b'|%d|' % len(os.environb[b'LONG']) + sys.argv[1].encode())"
    )
    call = Call((sys.executable, "-c", script, "a\nb"), {**THIS, "ODD": odd, "LONG": "x" * 120_000})
    Processes().run(call, folder=tmp_path, limit_s=60.0, log=tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == b"half \xc3 a letter|120000|a\nb"


ENDS: dict[str, tuple[str, float, bool]] = {
    "killed": ("import time; time.sleep(600)", 1.0, True),
    "died": ("import os; os.abort()", 60.0, True),
    "red": ("raise SystemExit(3)", 60.0, True),
    "well": ("", 60.0, False),
}


@pytest.mark.parametrize(("script", "limit_s", "ran"), ENDS.values(), ids=ENDS)
def test_what_outlives_the_process_is_ended_where_that_did_not_end_well(
    script: str, limit_s: float, ran: bool, tmp_path: Path
) -> None:
    """As a container does, whose client was killed; before the answer is there."""
    run([sys.executable, "-c", script], tmp_path, limit_s=limit_s, ends=["touch", str(tmp_path / "ended")])
    assert (tmp_path / "ended").exists() is ran


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
from megacpp_validate.environments import guard
from megacpp_validate.environments.environment import Call
from megacpp_validate.process import Processes
folder = Path(sys.argv[1])
call = Call((sys.executable, "-c", sys.argv[2]), os.environ, ("touch", str(folder / "ended")))
Processes().run(call, folder=folder, limit_s=600.0, log=folder / "log")
"""


def test_a_tool_that_is_killed_outright_takes_all_that_it_started_with_it(tmp_path: Path) -> None:
    """The process, what that started in turn, and the container behind it: nobody is left to end them."""
    tool = subprocess.Popen([sys.executable, "-c", TOOL, str(tmp_path), CHILD], cwd=Path(__file__).parents[2])
    assert within(30, lambda: len(read_pids(tmp_path / "log")) == 2)
    started = read_pids(tmp_path / "log")
    assert all(is_running(pid) for pid in started)
    tool.send_signal(signal.SIGKILL)
    tool.wait()
    assert within(10, lambda: not any(is_running(pid) for pid in started))
    assert within(10, (tmp_path / "ended").exists)


@pytest.mark.parametrize("said", ["", '{"words": ["touch", "started"], '], ids=["nothing", "half"])
def test_a_tool_that_is_killed_before_it_said_what_to_start_starts_nothing(said: str, tmp_path: Path) -> None:
    """The guard is there a moment before it is told: a line that closes then is no command."""
    ours, its = socket.socketpair()
    with ours, its:
        words = [sys.executable, "-I", "-S", str(guard.__file__), str(its.fileno())]
        process = subprocess.Popen(words, pass_fds=[its.fileno()], cwd=tmp_path)
        its.close()
        ours.sendall(said.encode())
        ours.close()
        assert process.wait(timeout=30) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_guard_that_is_killed_is_a_process_that_died(tmp_path: Path) -> None:
    script = "import os, time; print(os.getpid(), flush=True); os.kill(os.getppid(), 9); time.sleep(600)"
    ended = run([sys.executable, "-c", script], tmp_path)
    assert (ended.how, ended.code) == ("signal 9", -9)
    assert within(5, lambda: not is_running(int((tmp_path / "log").read_text())))


def read_pids(log: Path) -> list[int]:
    words = log.read_text() if log.exists() else ""
    return [int(word) for word in words.split()] if words.endswith("\n") else []


def test_what_could_not_be_started_by_its_own_words_is_told_apart(tmp_path: Path) -> None:
    """Docker's client ends with 125 where its engine is gone; that says nothing of the process."""
    call = Call(("sh", "-c", "echo Cannot connect; exit 125"), THIS, not_started=(125,))
    with pytest.raises(NotStarted, match="Cannot connect"):
        Processes().run(call, folder=tmp_path, limit_s=60.0, log=tmp_path / "log")
    assert run(["sh", "-c", "exit 125"], tmp_path).code == 125
