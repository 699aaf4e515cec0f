"""Signals that end a process as an interrupt does: with what it has started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, the first one of them alone: a terminal that closes sends both.

    One that the process was told to ignore (nohup) stays ignored.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]

    def interrupt(*_: object) -> NoReturn:
        for number in ours:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
