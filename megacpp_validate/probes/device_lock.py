"""Who may use a device now: any number of processes that compute side by side, or one that times, alone.

Two files are locked: the room, and the door before it. Whoever computes goes through the door and locks the room
shared; whoever times keeps the door locked while it waits for the room, so that newcomers wait behind it and it is not
starved (the turnstile solution of the readers and writers problem, A. Downey, The Little Book of Semaphores, 2nd ed.,
4.2.3). The locks are those of fcntl(2), which belong to a process: the kernel takes them back from one that was killed,
and a forked child, such as a compile worker, does not hold them on.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Final

DOOR: Final = ".door"
# Longer than anybody holds the room who is not stuck: a probe that compiles computes for a minute, and some thirty
# others time for a second and a half each. Who is stuck is killed by the time limit of its own cell, not of this one.
PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.01


def computing(path: str, patience_s: float = PATIENCE_S) -> AbstractContextManager[bool]:
    """Hold the room together with others that compute.

    Args:
        path: of the room, in a local folder; its door is beside it.
        patience_s: after that many seconds of waiting, go on without the lock.

    Returns:
        Whether the room is held. To go on without it spoils nobody's numbers, at worst somebody's times.

    Raises:
        OSError: a file cannot be opened or locked.
    """
    return _held(path, fcntl.LOCK_SH, patience_s)


def alone(path: str, patience_s: float = PATIENCE_S) -> AbstractContextManager[bool]:
    """Hold the room against everybody else; newcomers wait at the door from now on.

    Args:
        path: as of `computing`.
        patience_s: after that many seconds of waiting, give up.

    Returns:
        Whether the room is held. Without it nothing may be timed.

    Raises:
        OSError: a file cannot be opened or locked.
    """
    return _held(path, fcntl.LOCK_EX, patience_s)


@contextmanager
def _held(path: str, how: int, patience_s: float) -> Iterator[bool]:
    deadline = time.monotonic() + patience_s
    with Path(path + DOOR).open("a+") as door, Path(path).open("a+") as room:
        held = _take(door, fcntl.LOCK_EX, deadline) and _take(room, how, deadline)
        if how == fcntl.LOCK_SH:
            fcntl.lockf(door, fcntl.LOCK_UN)
        yield held


def _take(file: IO[Any], how: int, deadline: float) -> bool:
    """Lock one file; False where it was not to be had before the deadline (of time.monotonic)."""
    while True:
        try:
            fcntl.lockf(file, how | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # what a lock of another process gives, by platform
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
