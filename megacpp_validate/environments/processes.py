"""One process with a time limit: its whole group is killed from outside, and nobody waits for it for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_GRACE_S = 10.0  # a killed process that is not gone after this sleeps in the kernel: it is left alone
_LAST_WORDS_S = 2.0


class Stopped(RuntimeError):
    """Everything was told to stop before a process was started, or while it ran."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        how: "exit", "signal N" or "killed after N s".
        code: exit status, negative for a signal; None for a process that was killed from outside.
        seconds: wall-clock time.
        words: what it wrote to its standard streams.
    """

    how: str
    code: int | None
    seconds: float
    words: str


@dataclass
class Processes:
    """The processes that are running, so that all of them can be stopped at once."""

    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        limit_s: float,
        log: Path,
        given: Path = Path(os.devnull),
        ask_where: bool = False,
    ) -> Ended:
        """Run a command in its own process group, its words in the file `log` (a pipe would outlive it).

        Args:
            command, env, folder: what is started, with which environment, and where.
            limit_s: seconds that it may take.
            log: file for what it writes to its standard streams.
            given: file that it reads as its standard input.
            ask_where: send SIGABRT before it is killed, to which Python's faulthandler answers with where it hangs.

        Raises:
            Stopped: `stop` was called before, or while it ran: how it ended says nothing then.
            OSError: it cannot be started.
        """
        started = time.monotonic()
        with log.open("wb") as words, given.open("rb") as order:
            with self._lock:
                if self._stopped:
                    raise Stopped("everything was stopped before this process was started")
                process = subprocess.Popen(
                    command,
                    env=dict(env),
                    cwd=folder,
                    stdin=order,
                    stdout=words,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                code: int | None = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = None
                if ask_where:
                    _ask_where(process)
            finally:
                _kill_group(process)
                with self._lock:
                    self._running.discard(process)
        if self._stopped:
            raise Stopped("everything was stopped while this process ran")
        seconds = time.monotonic() - started
        return Ended(_say_end(code, limit_s), code, seconds, log.read_text(encoding="utf-8", errors="replace"))

    def stop(self) -> None:
        """Kill whatever runs; nothing is started afterwards."""
        with self._lock:
            self._stopped = True
            running = tuple(self._running)
        for process in running:
            _kill_group(process)


def _ask_where(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGABRT)
        process.wait(timeout=_LAST_WORDS_S)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it started: TE's import itself starts shells, which would keep running."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_GRACE_S)


def _say_end(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"killed after {limit_s:g} s"
    return f"signal {-code}" if code < 0 else "exit"
