"""The ranks of one host of several: started by torchrun, watched through what they leave, ended with all they started.

torchrun is given the static rendezvous. Its c10d one numbers hosts by their addresses, so that ranks would not lie as
the scheduler lists the hosts; and what c10d is for, hosts that come and go, is refused here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .collective_record import Collective, RankRecord, read_record
from .host_meeting import HostPlace
from .launch import Limits
from .rank_guard import WHERE
from .rank_process import ENDS_WITHIN, RankEnd, RankTrace, read_trace
from .rank_start import FOLDER, LAUNCHER, OWN_LOG, STORE, process_path, record_path

MONITOR: Final = 0.1  # seconds between torchrun's looks at its ranks


class HostRanks:
    """The ranks of this host.

    Args:
        words: the module that each runs, and its arguments.
        place: of this host.
        folder: of the run.
        endpoint: where the ranks of all hosts meet, "HOST:PORT".
        limits: of the run.
        environment: added to this process's.
    """

    def __init__(
        self,
        words: Sequence[str],
        place: HostPlace,
        folder: Path,
        endpoint: str,
        limits: Limits,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._place, self._folder = place, folder
        self.ranks = place.ranks_of(place.host)
        self._deaths = folder / f"host-{place.host}.deaths.json"
        given = {name: value for name, value in os.environ.items() if name != STORE}
        given |= {FOLDER: str(folder.absolute()), OWN_LOG: "1", LAUNCHER: str(os.getpid()), **(environment or {})}
        given.setdefault("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", f"{__package__}.torchrun_start", str(self._deaths)]
        with (folder / f"host-{place.host}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *torchrun_arguments(words, place, endpoint, limits)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=given,
            )

    def look(self) -> int | None:
        """torchrun's exit status, once it ended of itself."""
        return self._process.poll()

    def silent_for(self) -> float | None:
        """Seconds since any rank of this host moved; None until all have joined."""
        seen = [read_record(record_path(self._folder, rank)).seen_at for rank in self.ranks]
        return time.monotonic() - max(seen) if all(seen) else None

    def ask_where(self) -> None:
        """Have each rank that has joined write its stacks to its log."""
        for rank in self.ranks:
            with suppress(OSError, ValueError):
                if read_record(record_path(self._folder, rank)).seen_at:
                    os.kill(int(process_path(self._folder, rank).read_text(encoding="utf-8")), WHERE)

    def end(self) -> None:
        """End torchrun and all that it started; safe to call again."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.terminate()  # its guard kills whatever is below it
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_WITHIN)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def traces(self) -> tuple[RankTrace, ...]:
        """What the ranks of this host left, once they are ended."""
        dead: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            dead = json.loads(self._deaths.read_text(encoding="utf-8"))
        well = 0 if self._process.returncode == 0 else None
        found = []
        for rank in self.ranks:
            own = dead.get(str(rank), {"code": well, "at": 0.0})
            found.append(read_trace(self._folder, rank, own["code"], own["at"]))
        return tuple(found)

    def log(self) -> Path:
        """What torchrun itself printed."""
        return self._folder / f"host-{self._place.host}.log"


def torchrun_arguments(words: Sequence[str], place: HostPlace, endpoint: str, limits: Limits) -> list[str]:
    """What torchrun is called with on one host.

    Args:
        words: the module that each rank runs, and its arguments.
        place: of the host.
        endpoint: where the ranks of all hosts meet, "HOST:PORT".
        limits: of the run.
    """
    return [
        f"--nnodes={place.hosts}", f"--nproc-per-node={place.ranks_per_host}", f"--node-rank={place.host}",
        "--rdzv-backend=static", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=timeout={max(1, round(limits.joining))}",
        "--max-restarts=0", f"--monitor-interval={MONITOR}", "-m", f"{__package__}.rank_start", *words,
    ]  # fmt: skip


def trace_as_json(trace: RankTrace) -> dict[str, Any]:
    """A trace for another host."""
    end, record = vars(trace.end), vars(trace.record)
    last = None if trace.end.last is None else vars(trace.end.last)
    return {
        "end": {**end, "last": last, "log": str(trace.end.log)},
        "record": {**record, "collectives": [vars(one) for one in trace.record.collectives]},
        "failed_at": trace.failed_at,
        "said": trace.said,
    }


def trace_from_json(value: Mapping[str, Any]) -> RankTrace:
    """A trace of another host."""
    end, record = value["end"], value["record"]
    last = None if end["last"] is None else _collective(end["last"])
    return RankTrace(
        RankEnd(**{**end, "last": last, "log": Path(end["log"])}),
        RankRecord(**{**record, "collectives": tuple(map(_collective, record["collectives"]))}),
        value["failed_at"],
        value["said"],
    )


def _collective(value: Mapping[str, Any]) -> Collective:
    return Collective(**{**value, "group": tuple(value["group"])})
