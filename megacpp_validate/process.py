"""One process with a time limit: its whole group is killed from outside, and it never outlives this tool.

`run_command` runs one command and returns what it wrote. `Processes` runs many, each from a thread of its caller, and
stops all of them at once. The host rooms start every process by one of the two.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

_GUARD: Final = Path(__file__).with_name("process_guard.py")
_GRACE_S: Final = 40.0  # a cleanup may take 30 s; a killed process that is not gone by then sleeps in the kernel
_LAST_WORDS_S: Final = 2.0
_MOST_WORDS: Final = 2**20  # bytes: a process that runs wild writes gigabytes
_MOST_OUTPUT: Final = 2**28  # bytes that `run_command` returns: an SBOM is tens of MiB
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')  # as faulthandler writes it
_OF_A_STACK: Final = ("Current thread 0x", "Thread 0x", "Extension modules:")


@dataclass(frozen=True)
class Call:
    """A process that can be started.

    Attributes:
        words: the command.
        variables: its environment variables, whole.
        cleanup: a command that removes what outlives a process that did not end well, such as its container.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    cleanup: tuple[str, ...] = ()


class Stopped(RuntimeError):
    """`Processes.stop` was called before a process was started, or while it ran."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        how: "exit", "signal N" or "killed after N s".
        code: exit status, negative for a signal; None for a process that was killed at its limit.
        seconds: wall-clock time.
        words: what it wrote to its standard streams; the end of it, where that is very long.
        errors: what it wrote to its standard error, where the caller wants the two streams apart.
    """

    how: str
    code: int | None
    seconds: float
    words: str
    errors: str = ""

    @property
    def last_words(self) -> str:
        """The end of its errors, or of its output where there are none, without the stacks that faulthandler adds."""
        lines = [" ".join(line.split()) for line in (self.errors.strip() or self.words).splitlines()]
        spoken = [line for line in lines if line and not _FRAME.match(line) and not line.startswith(_OF_A_STACK)]
        return " | ".join(spoken)[-1200:] or "nothing"

    @property
    def frame(self) -> str:
        """Where it was when it died: the innermost frame that faulthandler wrote of the thread that died."""
        _, _, current = self.words.rpartition("Current thread")
        found = _FRAME.search(current or self.words)
        return f"{found[1]}:{found[2]} in {found[3]}" if found else ""


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A process behind its guard, and the socket to that guard, which the guard's end closes."""

    guard: subprocess.Popen[bytes]
    line: socket.socket

    def wait(self, limit_s: float) -> bytes | None:
        """What the guard answers, which is nothing where it has started the process; None at the limit."""
        self.line.settimeout(max(0.001, limit_s))
        try:
            return self.line.recv(65536)
        except OSError as fault:
            return None if isinstance(fault, TimeoutError) else b""

    def hang_up(self) -> None:
        """Let the guard kill the process with all that it started."""
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """The same, and wait until that is done."""
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self.guard.wait(timeout=_GRACE_S)


@dataclass
class Processes:
    """The processes that are running, so that all of them can be stopped at once.

    None of them outlives this one, whatever kills it: see `process_guard`.
    """

    _running: set[_Guarded] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def run(
        self, call: Call, *, folder: Path, limit_s: float, log: Path, errors: Path | None = None,
        given: Path = Path(os.devnull), ask_where: bool = False,
    ) -> Ended:  # fmt: skip
        """Run a command in its own process group; its output goes to the file `log` (a pipe would outlive it).

        Args:
            call: the command and its variables.
            folder: the working folder.
            limit_s: seconds that it may take.
            log: file for its standard streams.
            errors: file for its standard error alone; without it, that goes to `log`.
            given: file for its standard input.
            ask_where: send SIGABRT before it is killed, to which Python's faulthandler answers with where it hangs.

        Raises:
            Stopped: `stop` was called before, or while it ran: how it ended means nothing then.
            OSError: it cannot be started.
        """
        started = time.monotonic()
        process = self._start(call, folder, given, log, errors)
        try:
            answer = process.wait(limit_s)
            if answer is None and ask_where:
                with suppress(OSError):
                    process.line.sendall(b"where\n")
                process.wait(_LAST_WORDS_S)
        finally:
            process.kill()
            process.line.close()
            with self._lock:
                self._running.discard(process)
        if self._stopped:
            raise Stopped("everything was stopped while this process ran")
        if answer:
            raise OSError(*json.loads(answer))
        code = None if answer is None else process.guard.returncode
        words = _read_end(log, _MOST_WORDS)
        how = f"killed after {limit_s:g} s" if code is None else f"signal {-code}" if code < 0 else "exit"
        return Ended(how, code, time.monotonic() - started, words)

    def stop(self) -> None:
        """Kill whatever runs; nothing is started afterwards."""
        with self._lock:
            self._stopped = True
            running = tuple(self._running)
        for process in running:
            process.hang_up()  # all of them at once; then each is waited for
        for process in running:
            process.kill()

    def _start(self, call: Call, folder: Path, given: Path, log: Path, errors: Path | None) -> _Guarded:
        with log.open("wb") as words, (errors or log).open("wb") as faults, given.open("rb") as stdin, self._lock:
            if self._stopped:
                raise Stopped("everything was stopped before this process was started")
            ours, its = socket.socketpair()
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(its.fileno())], cwd=folder, stdin=stdin, stdout=words,
                stderr=faults if errors else subprocess.STDOUT, pass_fds=[its.fileno()], start_new_session=True,
            )  # fmt: skip
            its.close()
            process = _Guarded(guard, ours)
            self._running.add(process)
        order = {"words": list(call.words), "variables": dict(call.variables), "cleanup": call.cleanup}
        with suppress(OSError):  # a guard that is gone already answers nothing
            ours.sendall(json.dumps(order).encode() + b"\n")
        return process


def run_command(
    words: Sequence[str], *, limit_s: float, folder: Path | None = None, variables: Mapping[str, str] | None = None,
    given: bytes = b"", apart: bool = False, processes: Processes | None = None,
) -> Ended:  # fmt: skip
    """Run one command to its end and read what it wrote; its group is killed at the limit and on an interrupt.

    Args:
        words: the command; never a shell line.
        limit_s: seconds that it may take.
        folder: the working folder; the current one without it.
        variables: its environment variables, whole; this process's own without them.
        given: its standard input.
        apart: keep standard error out of `words`, in `errors`: for output that is parsed.
        processes: stops this command too, when it stops all of its own.

    Returns:
        Its code is None where it reached the limit, and 127 where it cannot be started; neither is an exception.
    """
    with tempfile.TemporaryDirectory(prefix="megacpp-run-") as name:
        log, errors, stdin = Path(name, "log"), Path(name, "errors"), Path(name, "stdin")
        stdin.write_bytes(given)
        call = Call(tuple(words), dict(os.environ if variables is None else variables))
        try:
            ended = (processes or Processes()).run(
                call, folder=folder or Path.cwd(), limit_s=limit_s, log=log, errors=errors if apart else None,
                given=stdin,
            )  # fmt: skip
        except OSError as fault:
            return Ended("not started", 127, 0.0, "", f"{call.words[0]} cannot be started: {fault}")
        words = _read_end(log, _MOST_OUTPUT)
        return replace(ended, words=words, errors=_read_end(errors, _MOST_WORDS) if apart else "")


def _read_end(log: Path, most: int) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most).decode(errors="replace")
