"""One process with a time limit: its whole group is killed from outside, and nobody waits for it for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .process_guard import WHERE

_GUARD: Final = Path(__file__).with_name("process_guard.py")
_GRACE_S: Final = 10.0  # a killed process that is not gone after this sleeps in the kernel: it is left to its guard
_ENDS_S: Final = 30.0  # what ends a container waits for the container
_LAST_WORDS_S: Final = 2.0
_WHY_NOT_STARTED: Final = 600  # characters
_MOST_WORDS: Final = 2**20  # bytes: a process that runs wild writes gigabytes


@dataclass(frozen=True)
class Call:
    """A process that can be started.

    Attributes:
        words: the command.
        variables: its environment variables, whole.
        ends: a command that ends what outlives the killed process group; empty where nothing does. A container goes
            on when the client that started it is gone.
        not_started: exit statuses by which what starts the process says that it could not, or that it lost it. Docker's
            own is 125 (docker-run(1), "Exit Status"); of the process they say nothing.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    ends: tuple[str, ...] = ()
    not_started: tuple[int, ...] = ()


class Stopped(RuntimeError):
    """Everything was told to stop before a process was started, or while it ran."""


class NotStarted(OSError):
    """What starts the process says that it could not, or that it lost it: an engine that is gone, for instance."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        how: "exit", "signal N" or "killed after N s".
        code: exit status, negative for a signal; None for a process that was killed from outside.
        seconds: wall-clock time.
        words: what it wrote to its standard streams; of more than a MiB the end, the log has all.
    """

    how: str
    code: int | None
    seconds: float
    words: str


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A process behind its guard, and the line to that."""

    guard: subprocess.Popen[bytes]
    line: socket.socket
    grace_s: float

    def wait(self, limit_s: float) -> Mapping[str, Any] | None:
        """What the guard answers; None where it does not in time, empty where it died itself."""
        until, text = time.monotonic() + limit_s, b""
        while not text.endswith(b"\n"):
            self.line.settimeout(max(0.001, until - time.monotonic()))
            try:
                more = self.line.recv(65536)
            except TimeoutError:
                return None
            except OSError:
                return {}
            if not more:
                return {}
            text += more
        answer: Mapping[str, Any] = json.loads(text)
        return answer

    def ask_where(self) -> None:
        """Let the process write down where it hangs."""
        with suppress(OSError):
            self.line.sendall(WHERE)
        self.wait(_LAST_WORDS_S)

    def kill(self) -> None:
        """Kill the process with all that it started, and wait until that is done."""
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            self.guard.wait(timeout=self.grace_s)


@dataclass
class Processes:
    """The processes that are running, so that all of them can be stopped at once.

    None of them outlives this one, whatever kills it: see `guard`.
    """

    _running: set[_Guarded] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def run(
        self,
        call: Call,
        *,
        folder: Path,
        limit_s: float,
        log: Path,
        given: Path = Path(os.devnull),
        ask_where: bool = False,
    ) -> Ended:
        """Run a command in its own process group, its words in the file `log` (a pipe would outlive it).

        Args:
            call: what is started, with which variables, and what ends that which outlives the process group.
            folder: where it is started.
            limit_s: seconds that it may take.
            log: file for what it writes to its standard streams.
            given: file that it reads as its standard input.
            ask_where: send SIGABRT before it is killed, to which Python's faulthandler answers with where it hangs.

        Raises:
            Stopped: `stop` was called before, or while it ran: how it ended says nothing then.
            OSError: it cannot be started.
        """
        started = time.monotonic()
        process = self._start(call, folder, log, given)
        try:
            answer = process.wait(limit_s)
            if answer is None and ask_where:
                process.ask_where()
        finally:
            process.kill()
            process.line.close()
            with self._lock:
                self._running.discard(process)
        if self._stopped:
            raise Stopped("everything was stopped while this process ran")
        if answer is not None and "error" in answer:
            raise OSError(*answer["error"])
        # A guard that was killed itself has no answer, and its own end is then the process's.
        code = None if answer is None else answer.get("code", process.guard.returncode)
        words = _read_end(log)
        if code in call.not_started:
            raise NotStarted(" ".join(words.split())[-_WHY_NOT_STARTED:])
        seconds = time.monotonic() - started
        return Ended(_say_end(code, limit_s), code, seconds, words)

    def stop(self) -> None:
        """Kill whatever runs; nothing is started afterwards."""
        with self._lock:
            self._stopped = True
            running = tuple(self._running)
        for process in running:
            with suppress(OSError):
                process.line.shutdown(socket.SHUT_WR)  # all of them at once; then each is waited for
        for process in running:
            process.kill()

    def _start(self, call: Call, folder: Path, log: Path, given: Path) -> _Guarded:
        ours, its = socket.socketpair()
        try:
            with its, log.open("wb") as words, given.open("rb") as order, self._lock:
                if self._stopped:
                    raise Stopped("everything was stopped before this process was started")
                guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_GUARD), str(its.fileno())],
                    cwd=folder,
                    stdin=order,
                    stdout=words,
                    stderr=subprocess.STDOUT,
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                )
                process = _Guarded(guard, ours, _GRACE_S + (_ENDS_S if call.ends else 0.0))
                self._running.add(process)
        except BaseException:
            ours.close()
            raise
        asked = {"words": list(call.words), "variables": dict(call.variables), "ends": list(call.ends)}
        with suppress(OSError):  # a guard that is gone already answers nothing
            ours.sendall(json.dumps(asked).encode() + b"\n")
        return process


def _read_end(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_WORDS))
        return file.read(_MOST_WORDS).decode(errors="replace")


def _say_end(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"killed after {limit_s:g} s"
    return f"signal {-code}" if code < 0 else "exit"


def run_command(
    words: Sequence[str],
    *,
    limit_s: float,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    given: bytes | None = None,
    processes: Processes | None = None,
) -> Ended:
    """Run one command to its end and read what it wrote; its group is killed at the limit and on an interrupt.

    Args:
        words: the command; never a shell line.
        limit_s: seconds that it may take.
        folder: where it is started; the current one without it.
        variables: its environment variables, whole; this process's own without them.
        given: what it reads on standard input.
        processes: stops this command too, when it stops all of its own.

    Raises:
        OSError: the command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-run-") as name:
        stdin = Path(os.devnull)
        if given is not None:
            stdin = Path(name, "stdin")
            stdin.write_bytes(given)
        call = Call(tuple(words), dict(os.environ if variables is None else variables))
        return (processes or Processes()).run(
            call, folder=folder or Path.cwd(), limit_s=limit_s, log=Path(name, "log"), given=stdin
        )
