"""The ranks of a run: torchrun starts them on each host, and this watches them and names the rank at fault.

torchrun does not notice a rank that hangs, and does not keep in which collective each rank was. So each host's launcher
starts torchrun (`agent`), reads the records of its own ranks while they run, and leaves a file in the folder of the run
when they are over, by which launchers of other hosts end theirs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...evidence.whole_file import write_whole
from ..errors import TrainingError
from .collective_record import RankRecord, read_record
from .ranks import FOLDER, HOST, LAUNCHER, STACKS, record_path
from .verdict import Ending, Limits, RankTrace, RunEnd, judge, read_trace

_LOOK_EVERY: Final = 0.05  # seconds
_STACKS_WITHIN: Final = 0.2
_AGENT_ENDS_WITHIN: Final = 5.0
_OTHERS_END_WITHIN: Final = 15.0  # until a host has seen that the run is over, and ended its ranks


class WrongLaunch(TrainingError, ValueError):
    """Ranks or limits that cannot be."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run; the same on each of them.

    Attributes:
        count: how many; torchrun's --nnodes.
        endpoint: HOST:PORT of the c10d rendezvous, on one of the hosts; torchrun's --rdzv-endpoint.
        run: of this run and no other; torchrun's --rdzv-id.
    """

    count: int = 1
    endpoint: str = "localhost:0"
    run: str = "run"


def launch(
    module: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    folder: Path,
    limits: Limits,
    hosts: Hosts | None = None,
    environment: Mapping[str, str] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> RunEnd:
    """Run a module on several ranks of this host, and wait for the whole run.

    When a rank dies, all are silent, or another host reports either, the ranks of this host are ended.

    Args:
        module: run as `python -m`, by each rank; it calls `join_ranks`.
        arguments: of the module.
        ranks: on this host, and on every other one.
        folder: of logs, records and receipts, shared by all hosts; a run on one host clears what an earlier one left.
        limits: of time.
        hosts: where there are several; each calls this function.
        environment: added to this process's.
        is_stopped: asked while the run goes on; true ends the run.

    Raises:
        WrongLaunch: no rank, no time, or a folder that holds the end of a run of the same name.
    """
    hosts = hosts or Hosts()
    _refuse(ranks, hosts, limits)
    _prepare(folder, hosts)
    started = time.monotonic()
    own = _OwnRanks([module, *arguments], ranks, folder, limits, hosts, environment or {})
    try:
        ending = own.watch(started, is_stopped)
    finally:
        own.end()
    own.leave(ending)
    ends = _await_hosts(folder, hosts, own.name)
    return _judge(ending, own, ends, limits, time.monotonic() - started)


def _refuse(ranks: int, hosts: Hosts, limits: Limits) -> None:
    if ranks < 1 or hosts.count < 1 or not 0 < limits.silent <= limits.whole:
        raise WrongLaunch(
            f"{hosts.count} host(s) with {ranks} rank(s) each, within {limits}, cannot be launched. Next step: pass 1 "
            "or more of both, and limits above 0 s, that of silence within that of the whole run."
        )


def _prepare(folder: Path, hosts: Hosts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if hosts.count == 1:
        for old in (*folder.glob("rank-*"), *folder.glob("host-*")):
            old.unlink()
    elif found := _read_ends(folder, hosts):
        raise WrongLaunch(
            f"{folder} holds the end of a run {hosts.run!r} already ({', '.join(sorted(found))}). Likely cause: an "
            "earlier run, or another host that failed already. Next step: pass a new --folder or another --rdzv-id."
        )


class _OwnRanks:
    """torchrun on this host and its ranks."""

    def __init__(
        self,
        words: Sequence[str],
        ranks: int,
        folder: Path,
        limits: Limits,
        hosts: Hosts,
        environment: Mapping[str, str],
    ) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.folder, self.hosts, self.ranks, self.limits = folder, hosts, ranks, limits
        self.log = folder / f"host-{self.name}.log"
        self._failures = folder / f"host-{self.name}.failures"
        order = {
            "hosts": hosts.count, "ranks": ranks, "endpoint": hosts.endpoint, "run": hosts.run, "words": list(words),
            "joining": limits.joining, "folder": str(folder.absolute()), "failures": str(self._failures.absolute()),
        }  # fmt: skip
        own = {FOLDER: str(folder.absolute()), HOST: self.name, LAUNCHER: str(os.getpid())}
        with self.log.open("wb") as log:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.agent", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, **own, **environment},
            )

    def watch(self, started: float, is_stopped: Callable[[], bool]) -> Ending:
        """Wait until the run is over or has to end: how it ended."""
        while True:
            if (code := self._agent.poll()) is not None:
                return "done" if code == 0 else "died" if self.records() else "not-started"
            if is_stopped():
                return "stopped"
            for other in _read_ends(self.folder, self.hosts).values():
                if other["ending"] != "done":
                    return other["ending"]
            now = time.monotonic()
            if (silent := self._is_silent(now, started)) or now - started > self.limits.whole:
                self._write_stacks()
                return ("hung" if self.records() else "not-started") if silent else "late"
            time.sleep(_LOOK_EVERY)

    def records(self) -> dict[int, RankRecord]:
        """Rank -> record, of the ranks of this host that have begun."""
        found = {rank: read_record(record_path(self.folder, rank)) for rank in range(self.hosts.count * self.ranks)}
        return {rank: record for rank, record in found.items() if record.host == self.name}

    def _is_silent(self, now: float, started: float) -> bool:
        """Silence counts once the process group is up on all ranks: imports and the rendezvous give no sign of life."""
        records = self.records().values()
        if len(records) < self.ranks or not all(record.seen_at for record in records):
            return now - started > self.limits.joining
        limit = (
            self.limits.silent
            if all(record.steps for record in records)
            else max(self.limits.silent, self.limits.joining)
        )
        return now - max(record.seen_at for record in records) > limit

    def _write_stacks(self) -> None:
        """Have every rank that has joined write its stacks to its log."""
        for record in self.records().values():
            if record.seen_at:
                with suppress(ProcessLookupError):
                    os.kill(record.pid, STACKS)
        time.sleep(_STACKS_WITHIN)

    def end(self) -> None:
        """End torchrun and its ranks, and what is left of a rank's process group."""
        if self._agent.poll() is None:
            self._agent.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._agent.wait(_AGENT_ENDS_WITHIN)
        self._agent.kill()  # the kernel then kills its ranks: `end_with_parent`
        self._agent.wait()
        for record in self.records().values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(record.pid, signal.SIGKILL)

    def leave(self, ending: Ending) -> None:
        """Leave a file for the other hosts: how it ended here, and rank -> exit code and time."""
        well = 0 if self._agent.returncode == 0 else None
        codes: dict[str, Any] = {str(rank): [well, 0.0] for rank in self.records()}
        with suppress(OSError, ValueError):
            codes |= json.loads(self._failures.read_text(encoding="utf-8"))
        for rank in codes:
            with suppress(OSError), record_path(self.folder, int(rank)).open("rb+") as record:
                os.fsync(record)  # a mapped file reaches other hosts of a shared folder so
        value = {"run": self.hosts.run, "ending": ending, "codes": codes}
        write_whole(self.folder / f"host-{self.name}.json", json.dumps(value))

    def traces(self, ends: Mapping[str, Mapping[str, Any]]) -> list[RankTrace]:
        """Of all ranks of the run."""
        codes = {rank: value for end in ends.values() for rank, value in end["codes"].items()}
        world = self.hosts.count * self.ranks
        return [read_trace(self.folder, rank, *codes.get(str(rank), (None, 0.0))) for rank in range(world)]


def _read_ends(folder: Path, hosts: Hosts) -> dict[str, Mapping[str, Any]]:
    """Host -> what its launcher left of this run."""
    found = {}
    for path in folder.glob("host-*.json"):
        with suppress(OSError, ValueError):
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["run"] == hosts.run:
                found[path.stem.removeprefix("host-")] = value
    return found


def _await_hosts(folder: Path, hosts: Hosts, own: str) -> dict[str, Mapping[str, Any]]:
    """The ends that all hosts left; without those of a host that is lost."""
    until = time.monotonic() + _OTHERS_END_WITHIN
    ends = _read_ends(folder, hosts)
    started = ends[own]["ending"] != "not-started"  # torchrun starts ranks on all hosts or on none
    while started and len(ends) < hosts.count and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)
        ends = _read_ends(folder, hosts)
    return ends


def _judge(
    ending: Ending, own: _OwnRanks, ends: Mapping[str, Mapping[str, Any]], limits: Limits, seconds: float
) -> RunEnd:
    traces = own.traces(ends)
    ranks = tuple(trace.end for trace in traces)
    if ending == "not-started":
        last = own.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        words = (
            f"torchrun started no rank: {''.join(last)}. Likely cause: not all {own.hosts.count} host(s) "
            f"reached the rendezvous {own.hosts.endpoint} within {limits.joining:g} s, or its port is in use. Next "
            f"step: see {own.log}."
        )
        return RunEnd(ending, (), words, ranks, seconds)
    if ending != "stopped" and len(ends) < own.hosts.count:
        lost = [trace.end.rank for trace in traces if trace.record.host not in ends]
        happened = (
            f"{own.hosts.count - len(ends)} of {own.hosts.count} host(s) left no report ("
            f"{', '.join(sorted({trace.record.host for trace in traces} - ends.keys() - {''})) or 'unknown'}), and the "
            "others were ended. Likely cause: the host or its launcher was ended (memory, a reboot, the scheduler), or "
            f"{own.folder} is no folder that all hosts share. Next step: see the system log of that host"
        )
        return judge("died", traces, limits, seconds, at_fault=lost, happened=happened)
    return judge(ending, traces, limits, seconds)
