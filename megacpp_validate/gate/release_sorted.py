"""What a store of receipts was sorted into, and what only the whole of it tells. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from ..catalog.gate import GateRules
from ..evidence.receipt import Outcome
from ..evidence.receipt_time import read_time
from ..evidence.release_gate import GateRule
from ..evidence.store import ReceiptFile, ReceiptHead
from .release_asked import DIRTY, Asked, Reason

NEVER: Final = datetime.min.replace(tzinfo=UTC)
_PHASES: Final = 3


@dataclass(frozen=True)
class Rejected:
    """A receipt that does not count.

    Attributes:
        closes: whether the gate stays closed by it: it is of a required cell, and hides what there is to see.
        warning: what a person should know of it.
    """

    seen: ReceiptFile
    reason: Reason
    closes: bool = False
    warning: str = ""


@dataclass
class Sorted:
    """What counts, by cell, and what does not.

    Attributes:
        copies: cells whose receipt counts, and took as long as another file says of another run -> that file.
    """

    counting: dict[str, ReceiptFile] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)


def find_copies(files: Iterable[ReceiptFile], counting: Mapping[str, ReceiptFile]) -> Iterator[tuple[str, str]]:
    """Receipts whose process took, in every phase and to the millisecond, what another receipt's did.

    Two processes never do: with three phases of seconds one pair in 10^9 would. What was edited to be of another cell,
    stack, commit or day keeps the times of what it was made from.
    """
    first: dict[tuple[tuple[str, float], ...], ReceiptFile] = {}
    second: dict[tuple[tuple[str, float], ...], ReceiptFile] = {}
    for one in files:
        if (key := _times(one)) and first.setdefault(key, one).sha256 != one.sha256:
            second.setdefault(key, one)
    for cell, one in counting.items():
        key = _times(one)
        if key in second:
            yield cell, (second[key] if one.sha256 == first[key].sha256 else first[key]).shown


def _times(one: ReceiptFile) -> tuple[tuple[str, float], ...]:
    """What a good receipt says of every phase of its process; empty where it says too little to tell two apart."""
    if one.head is None or not one.head.outcome.is_good or len(one.head.seconds) < _PHASES:
        return ()
    return tuple(sorted(one.head.seconds.items()))


def close_by_others(found: Sorted, rules: GateRules, asked: Asked) -> Iterator[Rejected]:
    """What was rejected, where a cell that is not required closes the gate by what would close it if it were.

    That is its newest receipt if it is red, an older red one that the newest takes back, and a file under its name that
    cannot be read. Of another commit than is judged, or older than any receipt may be, one says nothing of this
    release; files that differed from that commit make it no other one.
    """
    newest = max(found.counting.values(), key=rank_by_time, default=None)
    commit = asked.commit or (newest.head.commit if newest is not None and newest.head is not None else "")
    own = f"{asked.stack}-{rules.target.id}-"
    speaking: set[str] = set()
    last: dict[str, ReceiptFile] = {}
    for row in found.rejected:
        if row.reason.rule is GateRule.NOT_REQUIRED and _says_something(row.seen, commit, rules, asked):
            cell = row.seen.cell
            last[cell] = max(last.get(cell, row.seen), row.seen, key=rank_by_time)
            speaking.add(row.seen.file)
    for row in found.rejected:
        if row.reason.rule in (GateRule.UNREADABLE, GateRule.NAME) and _is_of(row.seen, own):
            yield replace(row, closes=True)
        else:
            reason = _find_red(row.seen, last[row.seen.cell], rules) if row.seen.file in speaking else None
            yield row if reason is None else replace(row, reason=reason, closes=True)


def _is_of(one: ReceiptFile, own: str) -> bool:
    """Whether a file says, or its name does, that it is of the judged stack and target."""
    return one.stem.startswith(own) or one.cell.startswith(own)


def _find_red(one: ReceiptFile, last: ReceiptFile, rules: GateRules) -> Reason | None:
    """Why a receipt of a cell that is not required closes the gate."""
    head, now = one.head, last.head
    if head is None or now is None:
        return None
    if one is last and _is_red(one):
        text = f"{head.outcome.value}, and {rules.kind.id} wants every cell green, required or not"
        return Reason(GateRule.OUTCOME, text, hard=True)
    if head.outcome.value in rules.kind.contradicts and head.outcome is not now.outcome and ran_the_same(head, now):
        text = f"it is {head.outcome.value}, and {last.shown} of the same commit and environment is {now.outcome.value}"
        return Reason(GateRule.CONTRADICTED, f"{text}: a failure that comes and goes is one", hard=True)
    return None


def ran_the_same(one: ReceiptHead, other: ReceiptHead) -> bool:
    """Whether two receipts are of one commit, environment and image."""
    return (one.commit, one.environment, one.image_digest) == (other.commit, other.environment, other.image_digest)


def _says_something(one: ReceiptFile, commit: str, rules: GateRules, asked: Asked) -> bool:
    """A red receipt whose time nobody can tell may be the newest; a good one from the future outdates nothing.

    One that was not run, or timed its module alone, judged nothing and takes nothing back, however new it is.
    """
    if one.head is None or one.head.commit.removesuffix(DIRTY) != commit.removesuffix(DIRTY):
        return False
    if one.head.outcome is Outcome.NOT_RUN or one.head.only_timed:
        return False
    started = read_time(one.head.started)
    if started is None or started > asked.at + timedelta(seconds=rules.kind.clock_skew_s):
        return _is_red(one)
    return asked.at - started <= timedelta(days=rules.kind.max_age_days)


def _is_red(one: ReceiptFile) -> bool:
    return one.head is not None and not one.head.outcome.is_good and one.head.outcome is not Outcome.NOT_RUN


def rank_by_time(one: ReceiptFile) -> tuple[datetime, bool, str]:
    """The newest last; of one second the red one."""
    started = read_time(one.head.started) if one.head is not None else None
    return (started or datetime.max.replace(tzinfo=UTC), _is_red(one), one.file)
