"""Which receipt counts for each required cell, and why each other one does not. Pure; the order of files never matters.

The newest receipt of a cell counts, and never one beside it: where it is bad, an older good one is no way out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from ..catalog.gate import GateRule, GateRules
from ..evidence.history import DIRTY
from ..evidence.receipt import Outcome, cell_id, read_time
from ..evidence.store import ReceiptFile
from .rules import Order, Reason

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_PHASES: Final = 3  # of a process, whose times tell two processes apart
_DISOWNING: Final = (GateRule.STACK, GateRule.TARGET, GateRule.AGE, GateRule.SCHEMA)


@dataclass
class Entry:
    """A file of the store, or a required cell without any, on its way to a verdict.

    Attributes:
        cell: its id, or what its file is called where that cannot be read.
        run: folder below the store.
        required: whether it is what is judged for a required cell.
        reasons: why it is refused; empty where it counts.
        standing: those of them that no waiver holds off.
        closes: whether it keeps the gate closed.
        copy_of: file of another run that took as long as this one, to the millisecond.
    """

    cell: str
    run: str = ""
    probe: str = ""
    file: ReceiptFile | None = None
    required: bool = False
    reasons: list[Reason] = field(default_factory=list)
    standing: list[Reason] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    closes: bool = False
    waived_by: str = ""
    copy_of: str = ""

    def refuse(self, rule: GateRule, text: str, *, closes: bool = False, hard: bool = True) -> None:
        """Refuse it for this reason alone."""
        self.reasons, self.closes = [Reason(rule, text, hard)], closes

    def is_refused_by(self, *rules: GateRule) -> bool:
        """Whether its first reason is of one of these rules."""
        return bool(self.reasons) and self.reasons[0].rule in rules

    def is_held_to(self, *rules: GateRule) -> bool:
        """Whether one of these rules stands against it."""
        return any(reason.rule in rules for reason in self.standing)

    @property
    def disowned(self) -> bool:
        """Whether it is of something else than is judged, so that whatever it shows is no breakage of this."""
        return self.is_held_to(*_DISOWNING)

    @property
    def breaks(self) -> bool:
        """Whether it closes the gate by a breakage."""
        return self.closes and not self.disowned and any(reason.breaks for reason in self.standing)


def select_receipts(files: Iterable[ReceiptFile], rules: GateRules, order: Order) -> list[Entry]:
    """An entry for every file, sorted by file; those that count are required and have no reasons yet."""
    own = f"{order.stack}-{rules.target.id}-"
    required = {own + probe for probe in rules.probes}
    entries, groups = [], dict[str, list[Entry]]()
    for one in sorted(files, key=lambda one: one.file):
        entry = Entry(one.cell, one.run, one.head.probe if one.head is not None else "", one)
        entries.append(entry)
        fault = next(_find_faults(one, required, rules, order), None)
        if fault is not None:
            entry.refuse(fault[0], fault[1], closes=fault[2])
        else:
            groups.setdefault(one.cell, []).append(entry)
    for group in groups.values():
        _choose_newest(group, rules)
    if rules.kind.others == "close":
        _close_by_others(entries, own, rules, order)
    _find_copies(entries)
    return entries


def rank_by_time(one: ReceiptFile) -> tuple[datetime, bool, str]:
    """The newest last; of one second the red one."""
    started = read_time(one.head.started) if one.head is not None else None
    return started or datetime.max.replace(tzinfo=UTC), _is_red(one), one.file


def _find_faults(
    one: ReceiptFile, required: set[str], rules: GateRules, order: Order
) -> Iterator[tuple[GateRule, str, bool]]:
    """Why a file is no receipt of a required cell, as far as it shows that alone: rule, text, and whether it closes.

    It closes where it may hide what there is to see of a required cell.
    """
    head, hides = one.head, one.leads_out or not required.isdisjoint((one.stem, one.cell))
    if head is None:
        yield GateRule.UNREADABLE, one.problem or "it is not a receipt", hides
        return
    names = head.stack, head.target, head.probe
    if odd := [name for name in names if not _NAME.fullmatch(name)]:
        yield GateRule.NAME, f"it has the invalid name {odd[0][:80]!r}", hides
    if not one.stem == head.cell == cell_id(*names):
        text = f"it holds the cell {head.cell[:120]!r} of {cell_id(*names)[:120]!r}, and its file is {one.stem[:120]!r}"
        yield GateRule.NAME, text, hides
    for rule, has, wants in (
        (GateRule.STACK, head.stack, order.stack),
        (GateRule.TARGET, head.target, rules.target.id),
        (GateRule.NOT_REQUIRED, head.probe, head.probe if head.probe in rules.probes else f"no {head.probe}"),
        (GateRule.COMMIT, head.commit, order.commit or head.commit),
        (GateRule.IMAGE, _digest(head.image_digest), _digest(order.image or head.image_digest)),
        (GateRule.LOCK, head.lock_hash, order.lock or head.lock_hash),
    ):
        if has != wants:
            yield rule, f"{rule.value}: this receipt has {has or 'none'}, and {rules.kind.id} requires {wants}", False
    if head.only_timed:
        yield GateRule.ONLY_TIMED, "it timed its module, and judged nothing of it", False
    started = read_time(head.started)
    if started is None:
        yield GateRule.CLOCK, f"its time of start is {head.started!r}, which is not a time with a zone", True
    elif started > order.at + timedelta(seconds=rules.kind.clock_skew_s):
        yield (
            GateRule.CLOCK,
            f"it started at {head.started}, after this decision at {order.at.isoformat()}. Likely cause: --at is too "
            "early, or the clock of one machine is wrong; which receipt is the newest is unknown",
            True,
        )


def _digest(image: str) -> str:
    return image.rpartition("@")[2]


def _choose_newest(group: Sequence[Entry], rules: GateRules) -> None:
    """The newest receipt of one cell counts, if it is one alone."""
    firsts: dict[str, ReceiptFile] = {}
    by_start: dict[datetime, list[tuple[Entry, ReceiptFile]]] = {}
    for entry in group:
        one = entry.file
        assert one is not None
        first = firsts.setdefault(one.sha256, one)
        if first is not one:
            entry.refuse(GateRule.REPLAYED, f"{first.shown} is the same receipt: a copy does not count as a second run")
        else:
            by_start.setdefault(rank_by_time(one)[0], []).append((entry, one))
    newest = max(by_start)
    _, young = by_start[newest][0]
    for start, ones in by_start.items():
        for entry, one in ones:
            others = ", ".join(other.shown for _, other in ones if other is not one)
            if others:
                text = f"{others} has the same start and another content: one of them was edited"
                entry.refuse(GateRule.DUPLICATE, text, closes=True)
            elif start == newest:
                entry.required = True
            else:
                _refuse_older(entry, one, young, newest - start, rules)


def _refuse_older(entry: Entry, one: ReceiptFile, young: ReceiptFile, age: timedelta, rules: GateRules) -> None:
    """An older receipt says nothing of today, unless it is red and what it ran is what the newest ran.

    A commit from which files differed names no state of them: what was wrong there may have been mended since.
    """
    words = _describe_pair(one, young)
    contradicts = _contradicts(one, young, rules) and age <= timedelta(days=rules.kind.max_age_days)
    if contradicts and not one.claims.commit.endswith(DIRTY):
        entry.refuse(GateRule.CONTRADICTED, words, closes=True, hard=False)
        return
    entry.refuse(GateRule.SUPERSEDED, f"{young.shown} is younger: {young.claims.started}")
    if contradicts:
        entry.warnings.append(f"{one.shown}: {words}; files differed from the commit, so it may be fixed since")


def _contradicts(one: ReceiptFile, young: ReceiptFile, rules: GateRules) -> bool:
    """Whether an older receipt is a failure that a younger one of the same sources does not take back."""
    old, now = one.claims, young.claims
    same = all(getattr(old, name) == getattr(now, name) for name in ("commit", "environment", "image_digest"))
    return same and old.outcome.value in rules.kind.contradicts and old.outcome is not now.outcome


def _describe_pair(one: ReceiptFile, young: ReceiptFile) -> str:
    return (
        f"it is {one.claims.outcome.value}, and {young.shown} of the same commit and environment is "
        f"{young.claims.outcome.value}: an intermittent failure counts as a failure"
    )


def _find_copies(entries: Iterable[Entry]) -> None:
    """Receipts whose process took, in every phase and to the millisecond, what another receipt's did.

    Two processes never do: with three phases of seconds one pair in 10^9 would. What was edited to be of another cell,
    stack, commit or day keeps the times of what it was made from.
    """
    alike: dict[tuple[tuple[str, float], ...], list[tuple[Entry, ReceiptFile]]] = {}
    for entry in entries:
        one = entry.file
        if one is not None and one.head is not None and one.head.outcome.is_good and len(one.head.seconds) >= _PHASES:
            alike.setdefault(tuple(sorted(one.head.seconds.items())), []).append((entry, one))
    for group in alike.values():
        for entry, one in group:
            if entry.required:
                entry.copy_of = next((other.shown for _, other in group if other.sha256 != one.sha256), "")


def _close_by_others(entries: Iterable[Entry], own: str, rules: GateRules, order: Order) -> None:
    """A cell that is not required closes the gate by what would close it if it were.

    That is its newest receipt if it is red, an older red one that the newest takes back, and a file under its name that
    cannot be read.
    """
    counting = [entry.file for entry in entries if entry.required and entry.file is not None]
    newest = max(counting, key=rank_by_time, default=None)
    commit = order.commit or (newest.claims.commit if newest is not None else "")
    about: dict[str, list[tuple[Entry, ReceiptFile]]] = {}
    for entry in entries:
        one = entry.file
        if one is not None and entry.is_refused_by(GateRule.UNREADABLE, GateRule.NAME):
            entry.closes |= one.stem.startswith(own) or one.cell.startswith(own)
        elif one is not None and entry.is_refused_by(GateRule.NOT_REQUIRED) and _is_about(one, commit, rules, order):
            about.setdefault(one.cell, []).append((entry, one))
    for group in about.values():
        last = max((one for _, one in group), key=rank_by_time)
        for entry, one in group:
            if one is last and _is_red(one):
                text = f"{one.claims.outcome.value}, and {rules.kind.id} wants every cell green, required or not"
                entry.refuse(GateRule.OUTCOME, text, closes=True)
            elif one is not last and _contradicts(one, last, rules):
                entry.refuse(GateRule.CONTRADICTED, _describe_pair(one, last), closes=True)


def _is_about(one: ReceiptFile, commit: str, rules: GateRules, order: Order) -> bool:
    """Whether it speaks about this release: of its commit, whether or not files differed from it, and not too old.

    A red receipt whose time is unknown may be the newest; a good one from the future outdates nothing. One that was not
    run, or timed its module alone, judged nothing and takes nothing back, however new it is.
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
