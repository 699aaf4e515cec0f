"""Ranks as processes of this host: started together, watched, and gone when this is over, whatever becomes of them.

The variables of a rank are torchrun's, so that one module runs under either. This launcher does what torchrun does not:
it holds the rendezvous port from before the first rank starts, ends a run that hangs, and says which rank is at fault
and in which collective each one was. It needs the standard library alone.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ..errors import TrainingError
from .collective_record import find_behind
from .rank_process import HOST, RankEnd, RankProcess, RankTrace, reserve_port
from .rank_start import FOLDER, LAUNCHER, STORE

LOOK_EVERY: Final = 0.05  # seconds

Ending = Literal["done", "died", "hung", "late", "stopped", "no-receipt"]


class WrongLaunch(TrainingError, ValueError):
    """Ranks or limits that cannot be."""


@dataclass(frozen=True)
class Limits:
    """How long a run may take, in seconds.

    Attributes:
        whole: the run, start-up included.
        silent: without a sign of life or a new collective on any rank, once all have joined; longer than the longest
            compile.
        joining: until every rank has joined (`join_ranks`).
        grace: after the first rank died, for the others to say what they saw.
    """

    whole: float
    silent: float
    joining: float = 120.0
    grace: float = 1.0


@dataclass(frozen=True)
class RunEnd:
    """What became of a run.

    Attributes:
        ending: "done" only where every rank ended well and left a receipt; "stopped" by a signal to the launcher.
        culprits: ranks at fault; empty where the records do not tell.
        words: what happened, likely cause, next step; empty where it is done.
        ranks: of each rank.
        seconds: wall time.
    """

    ending: Ending
    culprits: tuple[int, ...]
    words: str
    ranks: tuple[RankEnd, ...]
    seconds: float


def launch(
    module: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    folder: Path,
    limits: Limits,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> RunEnd:
    """Run a module on several ranks of this host, and wait for them.

    When one dies, or all are silent, the others are ended. No process of a rank's group is left.

    Args:
        module: that is run as `python -m`, by each rank.
        arguments: of the module.
        ranks: how many.
        folder: of logs and receipts; what an earlier run left there of its ranks is removed.
        limits: of time.
        port: of the rendezvous; 0 takes a free one.
        environment: added to this process's.

    Raises:
        PortInUse: another process has the port.
        WrongLaunch: no rank, or no time.
    """
    prepare(ranks, folder, limits)
    started = time.monotonic()
    processes: list[RankProcess] = []
    with reserve_port(port) as listening:
        given = {**_environment(ranks, folder, listening), **(environment or {})}
        try:
            for rank in range(ranks):
                processes.append(RankProcess(rank, [module, *arguments], folder, given, listening))  # noqa: PERF401
            listening.close()  # rank 0 has it: where that dies, nobody connects to a socket that no one answers
            ending = _watch(processes, limits, started)
        finally:
            for process in processes:
                process.end()
    return judge(ending, [process.trace() for process in processes], limits, time.monotonic() - started)


def prepare(ranks: int, folder: Path, limits: Limits) -> None:
    """Make the folder of a run, without what an earlier run left there of its ranks.

    Raises:
        WrongLaunch: no rank, or no time.
    """
    if ranks < 1 or not 0 < limits.silent <= limits.whole:
        raise WrongLaunch(
            f"{ranks} ranks within {limits}. Next step: ask for 1 or more, and for more than 0 seconds, those of "
            "silence within those of the whole run."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*"):
        old.unlink()


def _environment(ranks: int, folder: Path, listening: socket.socket) -> dict[str, str]:
    """This process's, with what torchrun gives all of its ranks, and what `rank_start` reads."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(listening.getsockname()[1]),
        STORE: str(listening.fileno()),
        FOLDER: str(folder.absolute()),
        LAUNCHER: str(os.getpid()),
    }


def _watch(processes: Sequence[RankProcess], limits: Limits, started: float) -> Ending:
    while True:
        codes = [process.look() for process in processes]
        if any(codes):  # None and 0 did not fail
            until = time.monotonic() + limits.grace
            while time.monotonic() < until and None in [process.look() for process in processes]:
                time.sleep(LOOK_EVERY)
            return "died"
        if None not in codes:
            return "done"
        now, seen = time.monotonic(), [process.record().seen_at for process in processes]
        silent = now - max(seen) > limits.silent if all(seen) else now - started > limits.joining
        if silent or now - started > limits.whole:
            for process in processes:
                process.ask_where()
            time.sleep(4 * LOOK_EVERY)  # the stacks are written by then
            return "hung" if silent else "late"
        time.sleep(LOOK_EVERY)


def judge(
    ending: Ending,
    traces: Sequence[RankTrace],
    limits: Limits,
    seconds: float,
    *,
    at_fault: Sequence[int] = (),
    happened: str = "",
) -> RunEnd:
    """What became of a run, from what its ranks left.

    Args:
        ending: as it was seen.
        traces: of all ranks, in their order.
        limits: of the run.
        seconds: that it took.
        at_fault: ranks that are known to be; those of a host that is gone.
        happened: words for that.
    """
    ranks = tuple(trace.end for trace in traces)
    if ending == "done":
        without = tuple(rank.rank for rank in ranks if rank.receipt is None)
        words = (
            f"rank {_list(without)} ended well and left no receipt. Next step: see the logs in {ranks[0].log.parent}."
        )
        return RunEnd("no-receipt" if without else "done", without, words if without else "", ranks, seconds)
    records = {trace.end.rank: trace.record for trace in traces}
    culprits = tuple(at_fault)  # a run that is late and still moves accuses nobody
    if ending == "died":
        culprits = culprits or _first_dead(traces) or find_behind(records) or _first_of(traces)
    elif ending == "hung":
        culprits = culprits or find_behind(records)
    happened = happened or _happened(ending, traces, limits)
    return RunEnd(ending, culprits, _words(happened, culprits, traces), ranks, seconds)


def _first_dead(traces: Sequence[RankTrace]) -> tuple[int, ...]:
    """The rank that died first of itself; one whose collective raised lost another rank, and is none."""
    own = []
    for trace in traces:
        last = trace.record.last
        lost_another = (trace.end.code or 0) > 0 and last is not None and last.state == "raised"
        own += [trace] if not lost_another else []
    return _first_of(own)


def _first_of(traces: Sequence[RankTrace]) -> tuple[int, ...]:
    dead = [(trace.failed_at, trace.end.rank) for trace in traces if trace.end.code]
    return (min(dead)[1],) if dead else ()


def _happened(ending: Ending, traces: Sequence[RankTrace], limits: Limits) -> str:
    return {
        "died": "a rank died, and the others were ended",
        "hung": f"no rank gave a sign of life for {limits.silent:g} s, and all were ended",
        "absent": f"not every rank had joined after {limits.joining:g} s, and all were ended",
        "late": f"the run was not done after {limits.whole:g} s, and all ranks were ended",
        "stopped": "the launcher was asked to end (SIGTERM or SIGINT), and all ranks were ended",
    }["absent" if ending == "hung" and not all(trace.record.seen_at for trace in traces) else ending]


def _words(happened: str, culprits: Sequence[int], traces: Sequence[RankTrace]) -> str:
    lines = [f"{happened}. At fault: {f'rank {_list(culprits)}' if culprits else 'not to be told from the records'}."]
    for end in (trace.end for trace in traces):
        how = "was ended" if end.code is None else f"ended by {_code(end.code)}"
        said = f"; {end.fault}" if end.fault else ""
        lines.append(f"rank {end.rank} {how}; last collective: {end.last.words() if end.last else 'none'}{said}")
    at_fault = [trace for trace in traces if trace.end.rank in culprits]
    lines += [f"rank {trace.end.rank} said last ({trace.end.log}): {trace.said or 'nothing'}" for trace in at_fault]
    return "\n".join(lines)


def _code(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"exit status {code}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
