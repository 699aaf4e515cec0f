"""Which receipt counts for each required cell, and why each other one does not. Pure; the order of files never matters.

The newest receipt of a cell counts, and never one beside it: where it is bad, an older good one is no way out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from ..catalog.gate import GateRule, GateRules
from ..evidence.history import DIRTY
from ..evidence.receipt import Outcome, cell_id
from ..evidence.receipt_time import read_time
from ..evidence.store import ReceiptFile, ReceiptHead
from .rules import Order, Reason

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_PHASES: Final = 3  # of a process, whose times tell two processes apart
_COMES_AND_GOES: Final = "of the same commit and environment is"


@dataclass(frozen=True)
class Rejected:
    """A file that does not count.

    Attributes:
        closes: whether it keeps the gate closed: it may hide what there is to see of a required cell.
        warning: what a person should know of it.
    """

    file: ReceiptFile
    reason: Reason
    closes: bool = False
    warning: str = ""


@dataclass
class Selection:
    """What counts, by cell, and what does not.

    Attributes:
        copies: cells whose receipt counts, and took as long as another file says of another run -> that file.
    """

    counting: dict[str, ReceiptFile] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)


def select_receipts(files: Iterable[ReceiptFile], rules: GateRules, order: Order) -> Selection:
    """Every file in one of two places."""
    found = Selection()
    required = {cell_id(order.stack, rules.target.id, probe) for probe in rules.probes}
    groups: dict[str, list[ReceiptFile]] = {}
    files = sorted(files, key=lambda one: one.file)
    for one in files:
        if (odd := _find_odd(one, required, rules, order)) is not None:
            found.rejected.append(odd)
        else:
            groups.setdefault(one.cell, []).append(one)
    for cell, group in groups.items():
        _sort_group(cell, group, rules, found)
    if rules.kind.others == "close":
        found.rejected = list(_close_by_others(found, rules, order))
    found.rejected.sort(key=lambda row: row.file.file)
    found.copies |= _find_copies(files, found.counting)
    return found


def rank_by_time(one: ReceiptFile) -> tuple[datetime, bool, str]:
    """The newest last; of one second the red one."""
    started = read_time(one.head.started) if one.head is not None else None
    return started or datetime.max.replace(tzinfo=UTC), _is_red(one), one.file


def ran_the_same(one: ReceiptHead, other: ReceiptHead) -> bool:
    """Whether two receipts are of one commit, environment and image."""
    return (one.commit, one.environment, one.image_digest) == (other.commit, other.environment, other.image_digest)


def _find_odd(one: ReceiptFile, required: set[str], rules: GateRules, order: Order) -> Rejected | None:
    """Why a file is no receipt of a required cell, as far as that can be told from it alone."""
    head = one.head
    hides = one.leads_out or one.stem in required or (head is not None and head.cell in required)
    if head is None:
        return _reject(one, GateRule.UNREADABLE, one.problem or "it is not a receipt", closes=hides)
    if why := _find_odd_name(one, head):
        return _reject(one, GateRule.NAME, why, closes=hides)
    if (foreign := _find_foreign(head, rules, order)) is not None:
        return Rejected(one, foreign)
    if head.only_timed:
        return _reject(one, GateRule.ONLY_TIMED, "it timed its module, and judged nothing of it")
    started = read_time(head.started)
    if started is None:
        why = f"its time of start is {head.started!r}, which is not a time with a zone"
        return _reject(one, GateRule.CLOCK, why, closes=True)
    if started > order.at + timedelta(seconds=rules.kind.clock_skew_s):
        why = (
            f"it started at {head.started}, after this decision at {order.at.isoformat()}. Likely cause: --at is too "
            "early, or the clock of one machine is wrong; which receipt is the newest is unknown"
        )
        return _reject(one, GateRule.CLOCK, why, closes=True)
    return None


def _reject(one: ReceiptFile, rule: GateRule, text: str, *, closes: bool = False) -> Rejected:
    return Rejected(one, Reason(rule, text, hard=True), closes)


def _find_odd_name(one: ReceiptFile, head: ReceiptHead) -> str:
    for what, name in (("stack", head.stack), ("target", head.target), ("probe", head.probe)):
        if not _NAME.fullmatch(name):
            return f"its {what} has the invalid name {name[:80]!r}"
    if head.cell != cell_id(head.stack, head.target, head.probe):
        return f"its cell {head.cell[:120]!r} is not its stack, target and probe joined"
    return "" if one.stem == head.cell else f"it holds the cell {head.cell}, and its file is named {one.stem[:120]!r}"


def _find_foreign(head: ReceiptHead, rules: GateRules, order: Order) -> Reason | None:
    """Of another stack, target, cell, commit, image or lock than is judged."""
    digest = order.image.rpartition("@")[2]
    rows = (
        (GateRule.STACK, head.stack, order.stack),
        (GateRule.TARGET, head.target, rules.target.id),
        (GateRule.NOT_REQUIRED, head.probe, head.probe if head.probe in rules.probes else "no such probe"),
        (GateRule.COMMIT, head.commit, order.commit or head.commit),
        (GateRule.IMAGE, head.image_digest.rpartition("@")[2], digest or head.image_digest.rpartition("@")[2]),
        (GateRule.LOCK, head.lock_hash, order.lock or head.lock_hash),
    )
    for rule, has, wants in rows:
        if has != wants:
            text = f"it is of the {rule.value} {has or 'none'}, and {wants} is judged"
            if rule is GateRule.NOT_REQUIRED:
                text = f"{rules.kind.id} requires no {head.probe} of {head.target}"
            return Reason(rule, text, hard=True)
    return None


def _sort_group(cell: str, group: Sequence[ReceiptFile], rules: GateRules, found: Selection) -> None:
    """The newest of one cell counts, if it is one alone."""
    firsts: dict[str, ReceiptFile] = {}
    for one in group:
        first = firsts.setdefault(one.sha256, one)
        if first is not one:
            why = f"the same receipt lies in {first.shown}: a copy is not a second run"
            found.rejected.append(_reject(one, GateRule.REPLAYED, why))
    by_start: dict[datetime, list[ReceiptFile]] = {}
    for one in firsts.values():
        by_start.setdefault(rank_by_time(one)[0], []).append(one)
    newest = max(by_start)
    for start, ones in by_start.items():
        if len(ones) > 1:
            for one in ones:
                others = ", ".join(other.shown for other in ones if other is not one)
                why = f"{others} has the same start and another content: one of them was edited"
                found.rejected.append(_reject(one, GateRule.DUPLICATE, why, closes=True))
        elif start == newest:
            found.counting[cell] = ones[0]
        else:
            found.rejected.append(_reject_older(ones[0], by_start[newest][0], newest - start, rules))


def _reject_older(one: ReceiptFile, young: ReceiptFile, age: timedelta, rules: GateRules) -> Rejected:
    """An older receipt says nothing of today, unless it is red and what it ran is what the newest ran.

    A commit from which files differed names no state of them: what was wrong there may have been mended since.
    """
    contradicts = _contradicts(one, young, rules) and age <= timedelta(days=rules.kind.max_age_days)
    words = _describe_pair(one, young)
    if contradicts and not one.claims.commit.endswith(DIRTY):
        return Rejected(one, Reason(GateRule.CONTRADICTED, words), closes=True)
    reason = Reason(GateRule.SUPERSEDED, f"{young.shown} is younger: {young.claims.started}", hard=True)
    warning = f"{one.shown}: {words}; files differed from the commit, so it may have been mended between"
    return Rejected(one, reason, warning=warning if contradicts else "")


def _contradicts(one: ReceiptFile, young: ReceiptFile, rules: GateRules) -> bool:
    """Whether an older receipt is a failure that a younger one of the same sources does not take back."""
    old, now = one.claims, young.claims
    return ran_the_same(old, now) and old.outcome.value in rules.kind.contradicts and old.outcome is not now.outcome


def _describe_pair(one: ReceiptFile, young: ReceiptFile) -> str:
    outcomes = one.claims.outcome.value, young.claims.outcome.value
    return f"it is {outcomes[0]}, and {young.shown} {_COMES_AND_GOES} {outcomes[1]}: an intermittent failure is one"


def _find_copies(files: Iterable[ReceiptFile], counting: Mapping[str, ReceiptFile]) -> Iterator[tuple[str, str]]:
    """Receipts whose process took, in every phase and to the millisecond, what another receipt's did.

    Two processes never do: with three phases of seconds one pair in 10^9 would. What was edited to be of another cell,
    stack, commit or day keeps the times of what it was made from.
    """
    alike: dict[tuple[tuple[str, float], ...], dict[str, ReceiptFile]] = {}
    for one in files:
        if one.head is not None and one.head.outcome.is_good and len(one.head.seconds) >= _PHASES:
            alike.setdefault(tuple(sorted(one.head.seconds.items())), {}).setdefault(one.sha256, one)
    for group in alike.values():
        for one in group.values():
            others = [other.shown for other in group.values() if other is not one]
            counted = counting.get(one.cell)
            if others and counted is not None and counted.sha256 == one.sha256:
                yield one.cell, others[0]


def _close_by_others(found: Selection, rules: GateRules, order: Order) -> Iterator[Rejected]:
    """What was rejected, where a cell that is not required closes the gate by what would close it if it were.

    That is its newest receipt if it is red, an older red one that the newest takes back, and a file under its name that
    cannot be read. Of another commit than is judged, or older than any receipt may be, one says nothing of this
    release; files that differed from that commit make it no other one.
    """
    newest = max(found.counting.values(), key=rank_by_time, default=None)
    commit = order.commit or (newest.claims.commit if newest is not None else "")
    own = f"{order.stack}-{rules.target.id}-"
    last: dict[str, ReceiptFile] = {}
    speaking: set[str] = set()
    for row in found.rejected:
        one = row.file
        if row.reason.rule is GateRule.NOT_REQUIRED and _is_about(one, commit, rules, order):
            last[one.cell] = max(last.get(one.cell, one), one, key=rank_by_time)
            speaking.add(one.file)
    for row in found.rejected:
        one = row.file
        if row.reason.rule in (GateRule.UNREADABLE, GateRule.NAME):
            yield replace(row, closes=row.closes or one.stem.startswith(own) or one.cell.startswith(own))
        elif one.file in speaking and one is last[one.cell] and _is_red(one):
            text = f"{one.claims.outcome.value}, and {rules.kind.id} wants every cell green, required or not"
            yield replace(row, reason=Reason(GateRule.OUTCOME, text, hard=True), closes=True)
        elif one.file in speaking and _contradicts(one, last[one.cell], rules):
            reason = Reason(GateRule.CONTRADICTED, _describe_pair(one, last[one.cell]), hard=True)
            yield replace(row, reason=reason, closes=True)
        else:
            yield row


def _is_about(one: ReceiptFile, commit: str, rules: GateRules, order: Order) -> bool:
    """A red receipt whose time nobody can tell may be the newest; a good one from the future outdates nothing.

    One that was not run, or timed its module alone, judged nothing and takes nothing back, however new it is.
    """
    head = one.claims
    if head.commit.removesuffix(DIRTY) != commit.removesuffix(DIRTY):
        return False
    if head.outcome is Outcome.NOT_RUN or head.only_timed:
        return False
    started = read_time(head.started)
    if started is None or started > order.at + timedelta(seconds=rules.kind.clock_skew_s):
        return _is_red(one)
    return order.at - started <= timedelta(days=rules.kind.max_age_days)


def _is_red(one: ReceiptFile) -> bool:
    return one.head is not None and not one.head.outcome.is_good and one.head.outcome is not Outcome.NOT_RUN
