"""Who may use a device now: any number of processes that compute side by side, or one that times, alone.

Two files are locked with flock(2): the room, and the door before it. Whoever computes goes through the door and locks
the room shared; whoever times keeps the door locked while it waits for the room, so that newcomers wait behind it and
it is not starved (the turnstile solution of the readers and writers problem, A. Downey, The Little Book of Semaphores,
2nd ed., 4.2.3). The kernel takes a lock back from a process that was killed, however it was.

Both files must lie on a local file system. Locks of one process do not shut out another thread of it that opens the
file anew any less: each `open` has a lock of its own.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final

DOOR: Final = ".door"
# Longer than anybody holds the room who is not stuck: a probe that compiles computes for a minute, and some thirty
# others time for a second and a half each. Who is stuck is killed by the time limit of its own cell, not of this one.
PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.01
_open: Final[set[int]] = set()


class NoTurnstile(RuntimeError):
    """The lock files cannot be opened or locked."""


def _close_all() -> None:
    """A forked child, such as a compile worker, has its parent's files open: the lock would outlive a killed parent."""
    for file in _open:
        os.close(file)
    _open.clear()


os.register_at_fork(after_in_child=_close_all)


def computing(path: str, patience_s: float = PATIENCE_S) -> AbstractContextManager[bool]:
    """Hold the room together with others that compute.

    Args:
        path: of the room; its door is beside it. Empty where there is nobody else: then nothing is locked.
        patience_s: after that many seconds of waiting, go on without the lock.

    Returns:
        Whether the room is held. To go on without it spoils nobody's numbers, at worst somebody's times.

    Raises:
        NoTurnstile: a file cannot be opened or locked.
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
        NoTurnstile: a file cannot be opened or locked.
    """
    return _held(path, fcntl.LOCK_EX, patience_s)


@contextmanager
def _held(path: str, how: int, patience_s: float) -> Iterator[bool]:
    deadline = time.monotonic() + patience_s
    with ExitStack() as room:
        with ExitStack() as door:
            held = not path or (
                door.enter_context(_locked(path + DOOR, fcntl.LOCK_EX, deadline))
                and room.enter_context(_locked(path, how, deadline))
            )
            if how == fcntl.LOCK_EX:
                room.push(door.pop_all())
        yield held


@contextmanager
def _locked(path: str, how: int, deadline: float) -> Iterator[bool]:
    """One file, locked while inside; False where it was not to be had before the deadline (of time.monotonic)."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as fault:
        raise _no_turnstile(path, fault) from fault
    _open.add(file)
    try:
        yield _try_until(file, path, how, deadline)
    finally:
        if file in _open:  # not in a child that was forked meanwhile
            _open.remove(file)
            os.close(file)


def _try_until(file: int, path: str, how: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError as fault:
            raise _no_turnstile(path, fault) from fault
        else:
            return True


def _no_turnstile(path: str, fault: OSError) -> NoTurnstile:
    return NoTurnstile(
        f"the turnstile {path} cannot be locked: {fault}. Likely cause: its folder is not there, not writable, or on a "
        "file system without locks. Next step: name a file in a local folder that every cell of this device can write."
    )
