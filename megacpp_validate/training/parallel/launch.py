"""The ranks of a run: torchrun starts them on each host, and this module watches them and names the rank at fault.

torchrun does not notice a rank that hangs, and does not keep in which collective each rank was. So each host's launcher
starts torchrun, reads the records of its own ranks while they run, and leaves a file in the folder of the run when they
are over, by which launchers of other hosts end theirs.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ...evidence.receipt import write_whole
from .. import TrainingError
from .ranks import FOLDER, HOST, STACKS, RankRecord, end_with_parent, find_behind, rank_path, read_record

Ending = Literal["done", "died", "hung", "late", "stopped", "no-receipt", "not-started"]
_LOOK_EVERY: Final = 0.05  # seconds
_STACKS_WITHIN: Final = 0.2
_AGENT_ENDS_WITHIN: Final = 5.0
_OTHERS_END_WITHIN: Final = 15.0  # until a host has seen that the run is over, and ended its ranks
_LONGEST_TEXT: Final = 1500  # characters of a log


class WrongLaunch(TrainingError, ValueError):
    """A run that cannot be launched so."""


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


@dataclass(frozen=True)
class Limits:
    """How long a run may take, in seconds.

    Attributes:
        whole: the run, start-up included.
        silent: without a sign of life or a new collective on any rank; longer than the longest compile. Before the
            first step and after the last one `joining` holds instead, if that is longer.
        joining: until the process group is up on every rank.
    """

    whole: float
    silent: float
    joining: float = 120.0


@dataclass(frozen=True)
class RunEnd:
    """The end of a run.

    Attributes:
        ending: "done" only where every rank ended well and left a receipt; "stopped" by a signal to the launcher;
            "not-started" where torchrun ended before a rank did anything.
        culprits: ranks at fault; empty where the records do not show which.
        words: what happened, likely cause, next step; empty where the run is done.
        ranks: of each rank: rank, code (exit status, negative for a signal; None where it was ended because the run was
            over), failed_at (seconds since the epoch; 0 where it did not), fault (what it raised), last (collective
            that it was in, or left last), step (-1 before the first), receipt (None without one), log (its standard
            error).
        seconds: wall time.
    """

    ending: str
    culprits: tuple[int, ...]
    words: str
    ranks: tuple[Mapping[str, Any], ...]
    seconds: float

    @property
    def receipts(self) -> dict[int, Mapping[str, Any]]:
        """Rank -> receipt, of the ranks that left one."""
        return {rank["rank"]: rank["receipt"] for rank in self.ranks if rank["receipt"] is not None}


def write_end(folder: Path, end: RunEnd) -> None:
    """Write the end of a run into its folder, receipts included."""
    write_whole(folder / "run.json", json.dumps(asdict(end), indent=1))


def read_end(folder: Path) -> RunEnd | None:
    """The end of a run; None where there is none."""
    if not (folder / "run.json").exists():
        return None
    value = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return RunEnd(**{**value, "culprits": tuple(value["culprits"]), "ranks": tuple(value["ranks"])})


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
        is_stopped: called while the run goes on; true ends the run.

    Raises:
        WrongLaunch: a folder that holds the end of a run of the same name.
    """
    hosts = hosts or Hosts()
    folder.mkdir(parents=True, exist_ok=True)
    if hosts.count == 1:
        for old in (*folder.glob("rank-*"), *folder.glob("host-*")):
            old.unlink()
    elif found := _read_hosts(folder, hosts):
        raise WrongLaunch(
            f"{folder} holds the end of a run {hosts.run!r} already ({', '.join(sorted(found))}). Likely cause: an "
            "earlier run, or another host that failed already. Next step: pass a new --folder or another --rdzv-id."
        )
    started = time.monotonic()
    own = _OwnRanks([module, *arguments], ranks, folder, limits, hosts, environment or {})
    try:
        ending = own.watch(started, is_stopped)
    finally:
        own.end()
    own.leave(ending)
    ends, seconds = own.await_hosts(), time.monotonic() - started
    codes = {rank: value for end in ends.values() for rank, value in end["codes"].items()}
    records = own.records(every=True)
    rows = [read_row(own.folder, rank, one, codes.get(str(rank), (None, 0.0, ""))) for rank, one in records.items()]
    if ending == "not-started":
        return RunEnd(ending, (), own.why_not_started(), tuple(rows), seconds)
    lost = [rank for rank, record in records.items() if record.host not in ends]
    return judge(ending, rows, records, limits, seconds, lost=lost if len(ends) < hosts.count else None)


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
        self.folder, self.hosts, self.limits, self.ranks = folder.absolute(), hosts, limits, ranks
        self.log, self._failures = (self.folder / f"host-{self.name}.{kind}" for kind in ("log", "failures"))
        options = [
            f"--nnodes={hosts.count}", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--monitor-interval=0.1",
            f"--rdzv-endpoint={hosts.endpoint}", f"--rdzv-id={hosts.run}",
            f"--rdzv-conf=join_timeout={max(1, round(limits.joining))}", "-m", *words,
        ]  # fmt: skip
        own = {FOLDER: str(self.folder), HOST: self.name}
        with self.log.open("wb") as log:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.folder), str(self._failures), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, **own, **environment},
            )

    def watch(self, started: float, is_stopped: Callable[[], bool]) -> Ending:
        """Wait until the run is over or has to end."""
        while True:
            if (code := self._agent.poll()) is not None:
                return "done" if code == 0 else "died" if self.records() else "not-started"
            if is_stopped():
                return "stopped"
            for other in _read_hosts(self.folder, self.hosts).values():
                if other["ending"] != "done":
                    return other["ending"]
            now = time.monotonic()
            if (silent := self._is_silent(now, started)) or now - started > self.limits.whole:
                for record in self.records().values():
                    if record.seen_at:
                        with suppress(ProcessLookupError):
                            os.kill(record.pid, STACKS)
                time.sleep(_STACKS_WITHIN)
                return ("hung" if self.records() else "not-started") if silent else "late"
            time.sleep(_LOOK_EVERY)

    def records(self, *, every: bool = False) -> dict[int, RankRecord]:
        """Rank -> record, of the ranks of this host that have begun, or of every rank of the run."""
        world = range(self.hosts.count * self.ranks)
        found = {rank: read_record(rank_path(self.folder, rank, "collectives")) for rank in world}
        return {rank: record for rank, record in found.items() if every or record.host == self.name}

    def _is_silent(self, now: float, started: float) -> bool:
        """Silence counts once the process group is up on all ranks: imports and the rendezvous give no sign of life."""
        records, limits = self.records().values(), self.limits
        if len(records) < self.ranks or not all(record.seen_at for record in records):
            return now - started > limits.joining
        stepping = all(record.steps for record in records)
        limit = limits.silent if stepping else max(limits.silent, limits.joining)
        return now - max(record.seen_at for record in records) > limit

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
        """Leave a file for the other hosts: how the run ended here, and rank -> exit code, time and fault."""
        well = 0 if self._agent.returncode == 0 else None
        codes: dict[str, Any] = {str(rank): [well, 0.0, ""] for rank in self.records()}
        with suppress(OSError, ValueError):
            codes |= json.loads(self._failures.read_text(encoding="utf-8"))
        for rank in codes:
            with suppress(OSError), rank_path(self.folder, rank, "collectives").open("rb+") as record:
                os.fsync(record)  # a mapped file reaches other hosts of a shared folder so
        value = {"run": self.hosts.run, "ending": ending, "codes": codes}
        write_whole(self.folder / f"host-{self.name}.json", json.dumps(value))

    def await_hosts(self) -> dict[str, Mapping[str, Any]]:
        """The files that all hosts left; without those of a host that is lost."""
        until = time.monotonic() + _OTHERS_END_WITHIN
        ends = _read_hosts(self.folder, self.hosts)
        started = ends[self.name]["ending"] != "not-started"  # torchrun starts ranks on all hosts or on none
        while started and len(ends) < self.hosts.count and time.monotonic() < until:
            time.sleep(_LOOK_EVERY)
            ends = _read_hosts(self.folder, self.hosts)
        return ends

    def why_not_started(self) -> str:
        """In words."""
        last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return (
            f"torchrun started no rank: {''.join(last)}. Likely cause: not all {self.hosts.count} host(s) reached the "
            f"rendezvous {self.hosts.endpoint} within {self.limits.joining:g} s, or its port is in use. Next step: see "
            f"{self.log}."
        )


def _read_hosts(folder: Path, hosts: Hosts) -> dict[str, Mapping[str, Any]]:
    """Host -> the file that its launcher left of this run."""
    found = {}
    for path in folder.glob("host-*.json"):
        with suppress(OSError, ValueError):
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["run"] == hosts.run:
                found[path.stem.removeprefix("host-")] = value
    return found


# --- verdict


def read_row(folder: Path, rank: int, record: RankRecord, code: Sequence[Any]) -> dict[str, Any]:
    """The entry of a rank in `RunEnd.ranks`; `code` is its exit status, the time of its fault, and the fault."""
    receipt = None
    with suppress(OSError, ValueError):
        receipt = json.loads(rank_path(folder, rank, "json").read_text(encoding="utf-8"))
    ended = dict(zip(("code", "failed_at", "fault"), code, strict=True))
    last, log = record.last.words() if record.last else "", str(rank_path(folder, rank, "stderr.log"))
    return {"rank": rank, **ended, "last": last, "step": record.step, "receipt": receipt, "log": log}


def judge(
    ending: Ending,
    rows: Sequence[Mapping[str, Any]],
    records: Mapping[int, RankRecord],
    limits: Limits,
    seconds: float,
    *,
    lost: Sequence[int] | None = None,
) -> RunEnd:
    """The end of a run: which ranks are at fault, and in words what happened.

    A fault that all ranks raise alike accuses the ranks that their receipts name (`culprits`), not the one that
    happened to end first.

    Args:
        ending: as the launcher saw it.
        rows: of `RunEnd.ranks`.
        records: rank -> its record.
        limits: of the run.
        seconds: wall time.
        lost: ranks of hosts that left no report; None where every host did.
    """
    ranks = tuple(rows)
    culprits = tuple(sorted({rank for one in ranks for rank in (one["receipt"] or {}).get("culprits", ())}))
    said = {one["fault"] for one in ranks}
    if ending == "died" and len(ranks) > 1 and len(said) == 1 and (fault := said.pop()):
        words = f"every rank ended the run: {fault}. Logs: {Path(ranks[0]['log']).parent}."
        return RunEnd(ending, culprits, words, ranks, seconds)
    if lost is not None and ending != "stopped":
        happened = (
            "a host left no report, and the others were ended. Likely cause: the host or its launcher was ended "
            "(memory, a reboot, the scheduler), or not all hosts share the folder of the run. Next step: see "
            "the log of that system"
        )
        return RunEnd("died", tuple(lost), _words(happened, lost, ranks), ranks, seconds)
    if ending == "done":
        without = tuple(rank["rank"] for rank in ranks if rank["receipt"] is None)
        words = f"rank {_list(without)} ended well and left no receipt. Next step: see {ranks[0]['log']}."
        return RunEnd("no-receipt" if without else "done", without, words if without else "", ranks, seconds)
    if not culprits:  # a run that is late and still moves has no culprit
        behind = find_behind(records)
        culprits = {"died": _first_dead(ranks, records) or behind, "hung": behind}.get(ending, ())
    happened = {
        "died": "a rank died, and the others were ended",
        "hung": f"no rank gave a sign of life for {limits.silent:g} s, and all were ended",
        "late": f"the run was not done after {limits.whole:g} s, and all ranks were ended",
        "stopped": "the launcher got SIGTERM or SIGINT, and all ranks were ended",
    }[ending]
    if ending == "hung" and not all(record.seen_at for record in records.values()):
        happened = f"not every rank had joined after {limits.joining:g} s, and all were ended"
    return RunEnd(ending, culprits, _words(happened, culprits, ranks), ranks, seconds)


def _first_dead(ranks: Sequence[Mapping[str, Any]], records: Mapping[int, RankRecord]) -> tuple[int, ...]:
    """The rank that died first of itself; one whose collective raised lost another rank."""
    own = []
    for row in ranks:
        last, code = records[row["rank"]].last, row["code"] or 0
        if code < 0 or (code > 0 and not (last is not None and last.state == "raised")):
            own.append((row["failed_at"], row["rank"]))
    return (min(own)[1],) if own else ()


def _words(happened: str, culprits: Sequence[int], ranks: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{happened}. At fault: {f'rank {_list(culprits)}' if culprits else 'unknown'}."]
    for end in ranks:
        code = end["code"]
        name = signal.Signals(-code).name if code and code < 0 else f"exit status {code}"
        fault = f"; {end['fault']}" if end["fault"] else ""
        how = "was ended" if code is None else f"ended by {name}"
        lines.append(f"rank {end['rank']} {how}; last collective: {end['last'] or 'none'}{fault}")
        if end["rank"] in culprits:
            with suppress(OSError):
                tail = Path(end["log"]).read_text(encoding="utf-8", errors="replace").strip()[-_LONGEST_TEXT:]
                lines.append(f"the log of rank {end['rank']} ({end['log']}) ends: {tail or 'empty'}")
    return "\n".join(lines)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


# --- agent
#
# torchrun for the ranks of one host, as a process of its own; exit status 0 where every rank ended well.
#
#     python -m megacpp_validate.training.parallel.launch FOLDER FAILURES TORCHRUN-OPTIONS
#
# Standard torchrun prints the exit codes of failed ranks in a table; this process leaves them as JSON, and names log
# and error files by the rank of the world, not of the host.


def run_agent(folder: Path, failures: Path, options: list[str]) -> int:
    """Run torchrun; rank -> exit code, time and fault of ranks that failed are written as JSON."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    class RankLogs(LogsSpecs):
        """Log and error files of ranks, all in the folder of the run."""

        root_log_dir = str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            """The files of each local rank, from the variables that torchrun gives it."""
            paths = {
                kind: {local: str(rank_path(folder, env["RANK"], kind)) for local, env in envs.items()}
                for kind in ("stdout.log", "stderr.log", "error.json")
            }
            for local, env in envs.items():
                env["TORCHELASTIC_ERROR_FILE"] = paths["error.json"][local]
            return LogsDest(stdouts=paths["stdout.log"], stderrs=paths["stderr.log"], error_files=paths["error.json"])

    end_with_parent()
    config, command, words = config_from_args(parse_args(options))
    config.logs_specs = RankLogs(str(folder))
    try:
        elastic_launch(config, command)(*words)
    except ChildFailedError as failed:
        found: dict[int, list[Any]] = {}
        for rank, one in failed.failures.items():
            path, said = rank_path(folder, rank, "error.json"), ""
            failed_at = float(one.timestamp)
            if path.exists():  # as `join_ranks` leaves it
                failed_at, said = path.stat().st_mtime, one.error_file_data["message"]["message"]
            found[rank] = [one.exitcode, failed_at, said]
        # torchrun ends the others with SIGTERM when one fails, and lists them too.
        of_itself = {rank: end for rank, end in found.items() if end[0] != -signal.SIGTERM}
        write_whole(failures, json.dumps(of_itself or found))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_agent(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
