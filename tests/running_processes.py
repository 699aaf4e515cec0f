"""Which processes run: what tests share that kill some, or look for what was left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs; one that is dead and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(folder: Path) -> list[int]:
    """Processes with this folder in their variables, this one left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(entry.name)
            if is_running(pid) and pid != os.getpid() and str(folder).encode() in (entry / "environ").read_bytes():
                found.append(pid)
    return found


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something holds within this time: a kill is delivered when the kernel next runs the process."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@contextmanager
def hearing_signals() -> Iterator[None]:
    """What is started meanwhile hears SIGHUP and SIGINT.

    Under `nohup`, or as a job in the background, tests ignore them, and a child inherits that.
    """
    heard = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, how) for number, how in heard.items()}
    try:
        yield
    finally:
        for number, how in before.items():
            signal.signal(number, how)
