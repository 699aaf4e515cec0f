"""Which receipt counts for each required cell, and why each other one does not. Pure; the order of files never matters.

The newest receipt of a cell counts, and never one beside it: where it is bad, an older good one is no way out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from ..catalog.gate import GateRules
from ..evidence.receipt import cell_id
from ..evidence.receipt_time import read_time
from ..evidence.release_gate import GateRule
from ..evidence.store import ReceiptFile, ReceiptHead
from .release_asked import DIRTY, Asked, Reason
from .release_sorted import NEVER, Rejected, Sorted, close_by_others, find_copies, ran_the_same

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")


def sort_receipts(seen: Iterable[ReceiptFile], rules: GateRules, asked: Asked) -> Sorted:
    """Every receipt in one of two places."""
    found = Sorted()
    wanted = {cell_id(asked.stack, rules.target.id, probe) for probe in rules.probes}
    groups: dict[str, list[tuple[ReceiptFile, ReceiptHead]]] = {}
    files = sorted(seen, key=lambda each: each.file)
    for one in files:
        odd = _find_odd(one, wanted, rules, asked)
        if odd is not None:
            found.rejected.append(odd)
        elif one.head is not None:
            groups.setdefault(one.head.cell, []).append((one, one.head))
    for cell, group in groups.items():
        _sort_group(cell, group, rules, found)
    if rules.kind.others == "close":
        found.rejected = list(close_by_others(found, rules, asked))
    found.rejected.sort(key=lambda each: each.seen.file)
    found.copies |= find_copies(files, found.counting)
    return found


def _find_odd(one: ReceiptFile, wanted: set[str], rules: GateRules, asked: Asked) -> Rejected | None:
    """Why a receipt is none of a required cell, as far as it can be told from it alone."""
    head = one.head
    hides = one.leads_out or one.stem in wanted or (head is not None and head.cell in wanted)
    if head is None:
        return Rejected(one, Reason(GateRule.UNREADABLE, one.problem or "it is no receipt", hard=True), hides)
    if why := _find_odd_name(one, head):
        return Rejected(one, Reason(GateRule.NAME, why, hard=True), hides)
    foreign = _find_foreign(head, rules, asked)
    if foreign is not None:
        return Rejected(one, foreign)
    if head.only_timed:
        return Rejected(one, Reason(GateRule.ONLY_TIMED, "it timed its module, and judged nothing of it", hard=True))
    started = read_time(head.started)
    if started is None:
        why = f"its time of start is {head.started!r}, which is no time with a zone"
        return Rejected(one, Reason(GateRule.CLOCK, why, hard=True), closes=True)
    if started > asked.at + timedelta(seconds=rules.kind.clock_skew_s):
        why = (
            f"it started at {head.started}, after this decision at {asked.at.isoformat()}: --at names too early a "
            "time, or the clock of one machine is wrong, and which receipt is the newest cannot be told"
        )
        return Rejected(one, Reason(GateRule.CLOCK, why, hard=True), closes=True)
    return None


def _find_odd_name(one: ReceiptFile, head: ReceiptHead) -> str:
    for what, name in (("stack", head.stack), ("target", head.target), ("probe", head.probe)):
        if not _NAME.fullmatch(name):
            return f"its {what} is called {name[:80]!r}, which is no name of one"
    if head.cell != cell_id(head.stack, head.target, head.probe):
        return f"its cell {head.cell[:120]!r} is not its stack, target and probe joined"
    if one.stem != head.cell:
        return f"it holds the cell {head.cell}, and lies under the name of {one.stem[:120]!r}"
    return ""


def _find_foreign(head: ReceiptHead, rules: GateRules, asked: Asked) -> Reason | None:
    """Of another stack, target, cell, commit, image or lock than is judged."""
    pairs = (
        (GateRule.STACK, "stack", head.stack, asked.stack),
        (GateRule.TARGET, "target", head.target, rules.target.id),
    )
    for rule, what, has, wants in pairs:
        if has != wants:
            return Reason(rule, f"it is of the {what} {has}, and {wants} is judged", hard=True)
    if head.probe not in rules.probes:
        return Reason(GateRule.NOT_REQUIRED, f"{rules.kind.id} requires no {head.probe} of {head.target}", hard=True)
    bound = (
        (GateRule.COMMIT, "commit", head.commit, asked.commit),
        (GateRule.IMAGE, "image", head.image_digest.rpartition("@")[2], asked.image.rpartition("@")[2]),
        (GateRule.LOCK, "lock", head.lock_hash, asked.lock),
    )
    for rule, what, has, wants in bound:
        if wants and has != wants:
            return Reason(rule, f"it is of the {what} {has or 'none'}, and {wants} is judged", hard=True)
    return None


def _sort_group(cell: str, group: Sequence[tuple[ReceiptFile, ReceiptHead]], rules: GateRules, found: Sorted) -> None:
    """The newest of one cell counts, if it is one alone."""
    firsts: dict[str, tuple[ReceiptFile, ReceiptHead]] = {}
    for one, head in group:
        first = firsts.setdefault(one.sha256, (one, head))
        if first[0] is not one:
            why = f"the same receipt lies in {first[0].shown} already: a copy is no second run"
            found.rejected.append(Rejected(one, Reason(GateRule.REPLAYED, why, hard=True)))
    by_start: dict[datetime, list[tuple[ReceiptFile, ReceiptHead]]] = {}
    for one, head in firsts.values():
        by_start.setdefault(read_time(head.started) or NEVER, []).append((one, head))
    newest = max(by_start)
    for start, ones in by_start.items():
        if len(ones) > 1:
            found.rejected += _tell_duplicates(ones)
        elif start == newest:
            found.counting[cell] = ones[0][0]
        else:
            found.rejected.append(_tell_older(*ones[0], by_start[newest], rules))


def _tell_duplicates(ones: Sequence[tuple[ReceiptFile, ReceiptHead]]) -> Iterator[Rejected]:
    for one, head in ones:
        others = ", ".join(other.shown for other, _ in ones if other is not one)
        why = f"{others} is of the same start, {head.started}, and says something else: one of them was edited"
        yield Rejected(one, Reason(GateRule.DUPLICATE, why, hard=True), closes=True)


def _tell_older(
    one: ReceiptFile, head: ReceiptHead, newest: Sequence[tuple[ReceiptFile, ReceiptHead]], rules: GateRules
) -> Rejected:
    """An older receipt says nothing of today, unless it is red and what it ran is what the newest ran.

    A commit from which files differed names no state of them: what was wrong there may have been mended since.
    """
    young, now = newest[0]
    age = (read_time(now.started) or NEVER) - (read_time(head.started) or NEVER)
    contradicts = (
        ran_the_same(head, now)
        and head.outcome.value in rules.kind.contradicts
        and head.outcome is not now.outcome
        and age <= timedelta(days=rules.kind.max_age_days)
    )
    if contradicts and not head.commit.endswith(DIRTY):
        why = (
            f"it is {head.outcome.value}, and {young.shown} of the same commit and environment is "
            f"{now.outcome.value}: a failure that comes and goes is one"
        )
        return Rejected(one, Reason(GateRule.CONTRADICTED, why), closes=True)
    reason = Reason(GateRule.SUPERSEDED, f"{young.shown} is younger: {now.started}", hard=True)
    warning = (
        f"{one.shown} is {head.outcome.value}, and {young.shown} is {now.outcome.value}: files differed from their "
    )
    warning += f"commit {head.commit[:12]}, and it may have been mended between, or come and go"
    return Rejected(one, reason, warning=warning if contradicts else "")
