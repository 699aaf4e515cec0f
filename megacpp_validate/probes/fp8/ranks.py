"""Ranks as processes: started together, watched, and gone when this is over, whatever becomes of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOOK_EVERY: Final = 0.05  # seconds
STARTED_BY: Final = "MEGACPP_RANKS_OF"  # process id, in the environment of a rank
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
LONGEST_TEXT: Final = 1500


@dataclass(frozen=True)
class RankResult:
    """What became of one rank.

    Attributes:
        rank: which.
        fault: what it did wrong, with its last words; empty where it ended well.
    """

    rank: int
    fault: str = ""


def run_ranks(command: Sequence[str], orders: Sequence[str], *, seconds: float,
              environment: Mapping[str, str] | None = None) -> tuple[RankResult, ...]:  # fmt: skip
    """Start one process a rank, each with its order on standard input, and wait for all.

    When one fails the others are ended: they would wait for it. None of them, and nothing that they started, is left.

    Args:
        command: of every rank.
        orders: of each rank, in order.
        seconds: for all of them together.
        environment: added to this process's.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[_Rank] = []
        try:
            for number, order in enumerate(orders):
                ranks.append(_Rank(number, command, order, Path(folder), environment or {}))
            _wait(ranks, time.monotonic() + seconds)
            late = f"not done after {seconds:g} s"
            return tuple(RankResult(rank.number, rank.fault(late)) for rank in ranks)
        finally:
            for rank in ranks:
                rank.end()


def end_with_who_started_it() -> None:
    """In a rank: the kernel ends this process with the one that started it, which may be killed first."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if STARTED_BY in os.environ and os.getppid() != int(os.environ[STARTED_BY]):
        sys.exit("who started this rank is gone")


def python_command(module: str) -> list[str]:
    """Runs a module of this project by this interpreter."""
    return [sys.executable, "-P", "-u", "-m", module]  # -P: the folder it is started in is none of its path


class _Rank:
    """One process, in a session of its own so that what it starts can be ended with it."""

    def __init__(
        self, number: int, command: Sequence[str], order: str, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.number, self.was_ended = number, False
        self.said, told = folder / f"{number}.txt", folder / f"{number}.json"
        told.write_text(order, encoding="utf-8")
        with told.open("rb") as given, self.said.open("wb") as words:
            self.process = subprocess.Popen(
                list(command),
                stdin=given,
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment, STARTED_BY: str(os.getpid())},
            )

    def end(self) -> None:
        """End it and all that it started; safe to call again."""
        self.was_ended = self.was_ended or self.process.poll() is None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def fault(self, late: str) -> str:
        """What it did wrong; `late` where it was running still when the time was over."""
        words = self.said.read_text(encoding="utf-8", errors="replace").strip()[-LONGEST_TEXT:]
        code = self.process.poll()
        if code == 0:
            return ""
        if code is None:
            return f"{late}; it said: {words or 'nothing'}"
        if self.was_ended:
            return f"ended, because another rank failed or time was over; it said: {words or 'nothing'}"
        return f"exit code {code}: {words or 'nothing was said'}"


def _wait(ranks: Sequence[_Rank], until: float) -> None:
    while time.monotonic() < until:
        codes = [rank.process.poll() for rank in ranks]
        if any(codes):  # one failed: None and 0 did not
            time.sleep(4 * LOOK_EVERY)  # the others may be about to say why
            break
        if all(code == 0 for code in codes):
            return
        time.sleep(LOOK_EVERY)
    else:
        return
    for rank in ranks:
        if rank.process.poll() is None:
            rank.end()
