"""A guard before each rank: when the launcher goes, or the rank does, nothing that the rank started is left.

A rank that waits inside a collective runs no Python: it can end nothing itself, and the kernel would kill it alone. So
the process that was started forks, while it is small, and stays behind as the guard of its child. What left the child's
group (a worker with a session of its own) becomes the guard's when its parent ends. Of Linux alone; elsewhere there is
no guard.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GONE_LIMIT: Final = 2.0  # seconds; what is killed and not gone by then sleeps in the kernel
WHERE: Final = signal.SIGUSR1  # every thread's stack goes to the log


def stand_guard(launcher: int | None) -> None:
    """Return in the child, which is the rank; the guard waits for it here and ends as it did.

    Args:
        launcher: process that started this one, if it said which: where that is gone already, nothing starts.
    """
    if not sys.platform.startswith("linux"):
        return
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _end)
    _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher is not None and os.getppid() != launcher:
        sys.exit("the launcher is gone")
    guard, child = os.getpid(), os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _control(_PR_SET_CHILD_SUBREAPER, 0)
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        return
    signal.signal(WHERE, lambda *_: os.kill(child, WHERE))
    _, status = os.waitpid(child, 0)
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # ended by a signal: so does the guard, for whoever waits for it
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as Python calls it
    _kill_descendants()
    os._exit(128 + signal.SIGTERM)


def _kill_descendants() -> None:
    """Kill every child of the guard, and what becomes one by that, until there is none."""
    until = time.monotonic() + _GONE_LIMIT
    while (children := list(_find_children())) and time.monotonic() < until:
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _find_children() -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                yield int(stat.parent.name)


def _control(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
