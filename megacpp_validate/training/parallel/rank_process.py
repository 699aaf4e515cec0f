"""One rank as a process, and the port where ranks meet."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import TrainingError
from .collective_record import Collective, RankRecord, read_record
from .rank_guard import WHERE
from .rank_start import failure_path, receipt_path, record_path

HOST: Final = "127.0.0.1"
LONGEST_TEXT: Final = 1500
ENDS_WITHIN: Final = 3.0  # seconds that a guard is given


class PortInUse(TrainingError, OSError):
    """A rendezvous port that another process has."""


@dataclass(frozen=True)
class RankEnd:
    """What became of one rank.

    Attributes:
        rank: which.
        code: exit status, negative for a signal; None where it was ended because the run was over.
        fault: what it raised; empty where it raised nothing.
        last: the collective that it was in, or left last; None before the first.
        step: of its last sign of life; -1 before the first.
        receipt: what it left; None without one.
        log: everything that it printed.
    """

    rank: int
    code: int | None
    fault: str
    last: Collective | None
    step: int
    receipt: Mapping[str, Any] | None
    log: Path


def reserve_port(port: int = 0) -> socket.socket:
    """A socket that listens on a port of this host; 0 takes a free one.

    Raises:
        PortInUse: another process has the port, or this one may not have it.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen(1024)
    except OSError as fault:
        listening.close()
        cause = "another run, or one whose ranks were not ended" if fault.errno == errno.EADDRINUSE else str(fault)
        raise PortInUse(
            f"port {port} of {HOST} cannot be had for the rendezvous. Likely cause: {cause}. Next step: end what "
            f"listens there (ss -ltnp 'sport = :{port}'), or pass port 0, which takes a free one."
        ) from fault
    return listening


class RankProcess:
    """One rank, in a session of its own so that what it starts can be ended with it.

    Args:
        rank: which.
        words: the module to run, and its arguments.
        folder: of logs and receipts.
        environment: of the process; the rank is added.
        listening: the socket of the rendezvous, which rank 0 inherits.

    Attributes:
        code: exit status, once it has ended of itself.
        log: what it prints.
    """

    def __init__(
        self, rank: int, words: list[str], folder: Path, environment: Mapping[str, str], listening: socket.socket
    ) -> None:
        self.rank, self.folder, self.log = rank, folder, folder / f"rank-{rank}.log"
        self.code: int | None = None
        self._died_at = 0.0
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.rank_start", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[listening.fileno()] if rank == 0 else [],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )

    def look(self) -> int | None:
        """Its exit status, once it ended of itself."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code, self._died_at = code, time.monotonic()
        return self.code

    def ask_where(self) -> None:
        """Have it write its stacks to the log, once it has joined: before that the signal would end it."""
        with suppress(ProcessLookupError):
            if self.look() is None and self.record().seen_at:
                self._process.send_signal(WHERE)

    def end(self) -> None:
        """End it and all that it started: its guard does, and its group is killed besides; safe to call again."""
        if self.look() is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_WITHIN)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def record(self) -> RankRecord:
        """Its collectives so far."""
        return read_record(record_path(self.folder, self.rank))

    def failure(self) -> tuple[float, str]:
        """When it failed and what it raised, as it says; else when its end was seen."""
        said = _read_json(failure_path(self.folder, self.rank))
        return (said["at"], said["fault"]) if said else (self._died_at, "")

    def result(self) -> RankEnd:
        """What became of it, once it is ended."""
        record = self.record()
        receipt = _read_json(receipt_path(self.folder, self.rank))
        return RankEnd(self.rank, self.code, self.failure()[1], record.last, record.step, receipt, self.log)

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace").strip()[-LONGEST_TEXT:]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
