"""What became of a run: which rank is at fault, from what ranks and torchrun left in the folder of the run."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ...evidence.whole_file import write_whole
from .collective_record import Collective, RankRecord, find_behind, read_record
from .ranks import error_path, log_paths, receipt_path, record_path

_LONGEST_TEXT: Final = 1500  # characters of a log

Ending = Literal["done", "died", "hung", "late", "stopped", "no-receipt", "not-started"]


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
class RankEnd:
    """What became of one rank.

    Attributes:
        rank: which.
        code: exit status, negative for a signal; None where the rank was ended because the run was over.
        fault: what it raised; empty where it raised nothing.
        last: the collective that it was in, or left last; None before the first.
        step: of its last sign of life; -1 before the first.
        receipt: what it left; None without one.
        log: its standard error.
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
    """All that a verdict needs of a rank.

    Attributes:
        end: what became of it.
        record: its collectives.
        failed_at: when it failed, in seconds since the epoch; 0 where it did not.
    """

    end: RankEnd
    record: RankRecord
    failed_at: float


@dataclass(frozen=True)
class RunEnd:
    """What became of a run.

    Attributes:
        ending: "done" only where every rank ended well and left a receipt; "stopped" by a signal to the launcher;
            "not-started" where torchrun ended before a rank did anything.
        culprits: ranks at fault; empty where the records do not show which.
        words: what happened, likely cause, next step; empty where it is done.
        ranks: of each rank.
        seconds: wall time.
    """

    ending: Ending
    culprits: tuple[int, ...]
    words: str
    ranks: tuple[RankEnd, ...]
    seconds: float


def read_trace(folder: Path, rank: int, code: int | None, ended_at: float = 0.0) -> RankTrace:
    """What a rank left in the folder of its run.

    Args:
        folder: of the run.
        rank: which.
        code: its exit status; None where it was ended.
        ended_at: when torchrun saw it end, seconds since the epoch; used where the rank left no error file.
    """
    record, error = read_record(record_path(folder, rank)), _read_json(error_path(folder, rank))
    fault, failed_at = "", ended_at
    if isinstance(error, dict) and isinstance(error.get("message"), dict):
        fault, failed_at = str(error["message"].get("message", "")), error_path(folder, rank).stat().st_mtime
    receipt, log = _read_json(receipt_path(folder, rank)), log_paths(folder, rank)[1]
    return RankTrace(RankEnd(rank, code, fault, record.last, record.step, receipt, log), record, failed_at)


def judge(
    ending: Ending,
    traces: Sequence[RankTrace],
    limits: Limits,
    seconds: float,
    *,
    at_fault: Sequence[int] = (),
    happened: str = "",
) -> RunEnd:
    """What became of a run.

    Args:
        ending: as the launcher saw it.
        traces: of all ranks, in their order.
        limits: of the run.
        seconds: wall time.
        at_fault: ranks that are known to be at fault: those of a lost host.
        happened: what happened to them.
    """
    ranks = tuple(trace.end for trace in traces)
    if ending == "done":
        without = tuple(rank.rank for rank in ranks if rank.receipt is None)
        words = (
            f"rank {_list(without)} ended well and left no receipt. Likely cause: the module writes none, or "
            f"{ranks[0].log.parent} is no folder that all hosts share. Next step: see the logs there."
        )
        return RunEnd("no-receipt" if without else "done", without, words if without else "", ranks, seconds)
    records = {trace.end.rank: trace.record for trace in traces}
    culprits = tuple(at_fault)  # a run that is late and still moves has no culprit
    if ending == "died":
        culprits = culprits or _first_dead(traces) or find_behind(records) or _first_of(traces)
    elif ending == "hung":
        culprits = culprits or find_behind(records)
    return RunEnd(
        ending, culprits, _words(happened or _happened(ending, traces, limits), culprits, traces), ranks, seconds
    )


def end_path(folder: Path) -> Path:
    """Where the end of a run is."""
    return folder / "run.json"


def write_end(folder: Path, end: RunEnd) -> None:
    """Write the end of a run as JSON, receipts included."""
    ranks = [{**vars(one), "last": one.last.words() if one.last else "", "log": str(one.log)} for one in end.ranks]
    write_whole(end_path(folder), json.dumps({**vars(end), "ranks": ranks}, indent=1))


def read_end(folder: Path) -> Mapping[str, Any] | None:
    """The end of a run as JSON; None where there is none."""
    value = _read_json(end_path(folder))
    return value if isinstance(value, dict) else None


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
    never_joined = ending == "hung" and not all(trace.record.seen_at for trace in traces)
    return {
        "died": "a rank died, and the others were ended",
        "hung": f"no rank gave a sign of life for {limits.silent:g} s, and all were ended",
        "absent": f"not every rank had joined after {limits.joining:g} s, and all were ended",
        "late": f"the run was not done after {limits.whole:g} s, and all ranks were ended",
        "stopped": "the launcher was asked to end (SIGTERM or SIGINT), and all ranks were ended",
    }["absent" if never_joined else ending]


def _words(happened: str, culprits: Sequence[int], traces: Sequence[RankTrace]) -> str:
    lines = [f"{happened}. At fault: {f'rank {_list(culprits)}' if culprits else 'unknown'}."]
    for end in (trace.end for trace in traces):
        how = "was ended" if end.code is None else f"ended by {_code(end.code)}"
        fault = f"; {end.fault}" if end.fault else ""
        lines.append(f"rank {end.rank} {how}; last collective: {end.last.words() if end.last else 'none'}{fault}")
    at_fault = [trace.end for trace in traces if trace.end.rank in culprits]
    lines += [f"the log of rank {end.rank} ({end.log}) ends: {_tail(end.log) or 'empty'}" for end in at_fault]
    return "\n".join(lines)


def _tail(log: Path) -> str:
    with suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace").strip()[-_LONGEST_TEXT:]
    return ""


def _code(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"exit status {code}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
