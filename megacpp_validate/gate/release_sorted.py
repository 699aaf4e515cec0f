"""What a store of receipts was sorted into, and what only the whole of it tells. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from ..catalog_gate import GateRules
from ..evidence.receipt import Outcome
from ..evidence.release_gate import GateRule
from .release_asked import Asked, Reason, read_time
from .release_reading import SeenReceipt

NEVER: Final = datetime.min.replace(tzinfo=UTC)
_PHASES: Final = 3


@dataclass(frozen=True)
class Rejected:
    """A receipt that does not count.

    Attributes:
        closes: whether the gate stays closed by it: it is of a required cell, and hides what there is to see.
    """

    seen: SeenReceipt
    reason: Reason
    closes: bool = False


@dataclass
class Sorted:
    """What counts, by cell, and what does not.

    Attributes:
        copies: cells whose receipt counts, and took as long as another file says of another run -> that file.
    """

    counting: dict[str, SeenReceipt] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)


def find_copies(files: Iterable[SeenReceipt], counting: Mapping[str, SeenReceipt]) -> Iterator[tuple[str, str]]:
    """Receipts whose process took, in every phase and to the millisecond, what another receipt's did.

    Two processes never do: with three phases of seconds one pair in 10^9 would. What was edited to be of another cell,
    stack, commit or day keeps the times of what it was made from.
    """
    first: dict[tuple[tuple[str, float], ...], SeenReceipt] = {}
    second: dict[tuple[tuple[str, float], ...], SeenReceipt] = {}
    for one in files:
        if (key := _times(one)) and first.setdefault(key, one).sha256 != one.sha256:
            second.setdefault(key, one)
    for cell, one in counting.items():
        key = _times(one)
        if key in second:
            yield cell, (second[key] if one.sha256 == first[key].sha256 else first[key]).file


def _times(one: SeenReceipt) -> tuple[tuple[str, float], ...]:
    """What a good receipt says of every phase of its process; empty where it says too little to tell two apart."""
    if one.head is None or not one.head.outcome.is_good or len(one.head.seconds) < _PHASES:
        return ()
    return tuple(sorted(one.head.seconds.items()))


def close_by_others(found: Sorted, rules: GateRules, asked: Asked) -> Iterator[Rejected]:
    """What was rejected, where the newest receipt of a cell that is not required closes the gate if it is red.

    Of another commit than is judged, or older than any receipt may be, it says nothing of this release.
    """
    newest = max(found.counting.values(), key=_rank, default=None)
    commit = asked.commit or (newest.head.commit if newest is not None and newest.head is not None else "")
    last: dict[str, SeenReceipt] = {}
    for row in found.rejected:
        if row.reason.rule is GateRule.NOT_REQUIRED and _says_something(row.seen, commit, rules, asked):
            cell = row.seen.cell
            last[cell] = max(last.get(cell, row.seen), row.seen, key=_rank)
    for row in found.rejected:
        head = row.seen.head
        if head is not None and last.get(row.seen.cell) is row.seen and _is_red(row.seen):
            text = f"{head.outcome.value}, and {rules.kind.id} wants every cell green, required or not"
            yield replace(row, reason=Reason(GateRule.OUTCOME, text, hard=True), closes=True)
        else:
            yield row


def _says_something(one: SeenReceipt, commit: str, rules: GateRules, asked: Asked) -> bool:
    """A red receipt whose time nobody can tell may be the newest; a good one from the future outdates nothing."""
    if one.head is None or one.head.commit != commit:
        return False
    started = read_time(one.head.started)
    if started is None or started > asked.at + timedelta(seconds=rules.kind.clock_skew_s):
        return _is_red(one)
    return asked.at - started <= timedelta(days=rules.kind.max_age_days)


def _is_red(one: SeenReceipt) -> bool:
    return one.head is not None and not one.head.outcome.is_good and one.head.outcome is not Outcome.NOT_RUN


def _rank(one: SeenReceipt) -> tuple[datetime, bool, str]:
    """The newest last; of one second the red one."""
    started = read_time(one.head.started) if one.head is not None else None
    return (started or datetime.max.replace(tzinfo=UTC), _is_red(one), one.file)
