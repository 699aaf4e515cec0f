"""One process below process 1: signals reach it, whatever is left behind is buried, and its end is ours."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

INTERRUPTED: Final = 130
INFRASTRUCTURE: Final = 6
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_child(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command to its end; an exit code of the design.

    A process 1 that does not wait for orphans collects them for as long as the container lives, and one without
    handlers is deaf to `docker stop`.
    """
    asked: list[int] = []  # signals, in their order; one may come before there is a child
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: object) -> None:
        asked.append(number)
        if child is not None:
            with suppress(ProcessLookupError):
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        child = subprocess.Popen(words, env=dict(variables))
        for number in tuple(asked):
            child.send_signal(number)
        status = _bury_until(child.pid)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    child.returncode = os.waitstatus_to_exitcode(status)  # it was waited for here, and not by subprocess
    if child.returncode < 0:
        return INTERRUPTED if asked else INFRASTRUCTURE
    return child.returncode


def _bury_until(pid: int) -> int:
    while True:
        ended, status = os.wait()
        if ended == pid:
            return status
