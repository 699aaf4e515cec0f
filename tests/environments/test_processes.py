"""A process ends in time, with all that it started."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from megacpp_validate.environments.processes import Processes, Stopped


def test_what_a_process_started_is_killed_with_it(tmp_path: Path) -> None:
    script = "import subprocess, sys, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)"
    ended = Processes().run(
        [sys.executable, "-c", script], env=os.environ, folder=tmp_path, limit_s=3.0, log=tmp_path / "log"
    )
    assert ended.how == "killed after 3 s"
    assert ended.code is None
    grandchild = int(ended.words)
    deadline = time.monotonic() + 10
    while is_running(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(grandchild)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that is dead and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_that_leaves_a_child_behind_is_not_waited_for(tmp_path: Path) -> None:
    script = "import subprocess\nsubprocess.Popen(['sleep', '600'])\nprint('done')"
    ended = Processes().run(
        [sys.executable, "-c", script], env=os.environ, folder=tmp_path, limit_s=60.0, log=tmp_path / "log"
    )
    assert (ended.how, ended.code, ended.words) == ("exit", 0, "done\n")
    assert ended.seconds < 30


def test_how_a_process_ended_that_was_stopped_is_not_told(tmp_path: Path) -> None:
    processes = Processes()
    timer = threading.Timer(0.5, processes.stop)
    timer.start()
    with pytest.raises(Stopped, match="while this process ran"):
        processes.run(["sleep", "600"], env=os.environ, folder=tmp_path, limit_s=60.0, log=tmp_path / "log")
    timer.join()


def test_a_process_reads_what_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("an order")
    run = Processes().run
    env, log = os.environ, tmp_path / "log"
    assert run(["cat"], env=env, folder=tmp_path, limit_s=60.0, log=log, given=tmp_path / "given").words == "an order"
    assert run(["cat"], env=env, folder=tmp_path, limit_s=60.0, log=log).words == ""


def test_nothing_is_started_after_a_stop(tmp_path: Path) -> None:
    processes = Processes()
    processes.stop()
    with pytest.raises(Stopped):
        processes.run([sys.executable, "-V"], env={}, folder=tmp_path, limit_s=1.0, log=tmp_path / "log")
