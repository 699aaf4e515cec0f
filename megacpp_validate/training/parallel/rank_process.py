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
from .rank_start import failure_path, log_path, receipt_path, record_path

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


@dataclass(frozen=True)
class RankTrace:
    """What a rank has left once it is ended: all that a judgement of the run needs, and can be sent to another host.

    Attributes:
        end: what became of it.
        record: its collectives.
        failed_at: when it failed or was seen to have ended, in seconds since the epoch.
        said: the end of its log.
    """

    end: RankEnd
    record: RankRecord
    failed_at: float
    said: str


def read_trace(folder: Path, rank: int, code: int | None, ended_at: float = 0.0) -> RankTrace:
    """What a rank left in the folder of its run; to be read on its own host, whose clock it is.

    Args:
        folder: of the run.
        rank: which.
        code: its exit status; None where it was ended.
        ended_at: seconds since the epoch; of use where the rank itself did not say.
    """
    record, said = read_record(record_path(folder, rank)), _read_json(failure_path(folder, rank))
    failed_at = said["at"] + time.time() - time.monotonic() if said else ended_at
    receipt, log = _read_json(receipt_path(folder, rank)), log_path(folder, rank)
    end = RankEnd(rank, code, said["fault"] if said else "", record.last, record.step, receipt, log)
    try:
        words = log.read_text(encoding="utf-8", errors="replace").strip()[-LONGEST_TEXT:]
    except OSError:
        words = ""  # never started
    return RankTrace(end, record, failed_at, words)


def reserve_port(port: int = 0, host: str = HOST) -> socket.socket:
    """A socket that listens on a port of this host; 0 takes a free one.

    Raises:
        PortInUse: another process has the port, or this one may not have it.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as fault:
        listening.close()
        cause = "another run, or one whose ranks were not ended" if fault.errno == errno.EADDRINUSE else str(fault)
        raise PortInUse(
            f"port {port} of {host} cannot be had for the rendezvous. Likely cause: {cause}. Next step: end what "
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
        self.rank, self.folder, self.log = rank, folder, log_path(folder, rank)
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
            self.code, self._died_at = code, time.time()
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

    def trace(self) -> RankTrace:
        """What it left, once it is ended."""
        return read_trace(self.folder, self.rank, self.code, self._died_at)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
