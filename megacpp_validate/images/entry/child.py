"""One process below process 1: signals reach it, whatever is left behind is buried, and its end is ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from .refusals import INFRASTRUCTURE

INTERRUPTED: Final = 130
_FORWARDED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_OF_THE_KEYBOARD: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
_CRASHES: Final = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP}
)
_ENDING: Final = frozenset(_FORWARDED) - {signal.SIGUSR1, signal.SIGUSR2}


def run_child(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a verb to its end; an exit code of the design."""
    code, asked = _run(words, variables)
    if code < 0 and not asked:
        sys.stderr.write(f"megacpp: {_say_killed(-code)}\n")
        return INFRASTRUCTURE
    return INTERRUPTED if code < 0 else code


def _say_killed(number: int) -> str:
    """A process that is killed says nothing itself."""
    if number == signal.SIGKILL:
        cause, step = "memory ran out, of this container (--memory) or of the machine", "give it more"
    elif number in _CRASHES:
        cause, step = "compiled code crashed", "`megacpp doctor`, and the lines above"
    else:
        cause, step = "a process of this container or of the machine sent it", "start it again"
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"  # of real time: no name
    return (
        f"{name} has ended the session, and nothing is said of any release. Likely cause: {cause}. Next step: {step}."
    )


def run_command(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run any other command to its end; its own exit code, and 128 and the signal where one ended it.

    Raises:
        OSError: it cannot be started.
    """
    code, asked = _run(words, variables)
    if code < 0:
        return INTERRUPTED if asked else 128 - code
    return code


def _run(words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, bool]:
    """How a command ended, the number of a signal negative, and whether this process was asked to end meanwhile.

    A process 1 that does not wait for orphans collects them for as long as the container lives, and one without
    handlers is deaf to `docker stop`. What a terminal sends for its keys reaches the child without us: twice would cut
    short what it does at the first.
    """
    passed = set(_FORWARDED) - (_OF_THE_KEYBOARD if os.isatty(0) else frozenset())
    asked: list[int] = []  # signals, in their order; one may come before there is a child
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: object) -> None:
        asked.append(number)
        if child is not None and number in passed:
            with suppress(ProcessLookupError):
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        child = subprocess.Popen(words, env=dict(variables))
        for number in tuple(asked):  # that came before there was a child
            child.send_signal(number)
        status = _bury_until(child.pid)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    child.returncode = os.waitstatus_to_exitcode(status)  # it was waited for here, and not by subprocess
    return child.returncode, not _ENDING.isdisjoint(asked)


def _bury_until(pid: int) -> int:
    while True:
        ended, status = os.wait()
        if ended == pid:
            return status
