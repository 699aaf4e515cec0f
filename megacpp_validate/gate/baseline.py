"""Speed and memory of a release beside those of the one before it. Pure.

How much slower or larger is too much is a rule: `slowdown`, `memory` and `memory_floor_mib` of matrix/gate.toml.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ..catalog.gate import GateRule, GateRules
from ..evidence.receipt import Part, Receipt, Timing
from ..evidence.receipt_time import read_time
from ..evidence.store import ReceiptFile
from .rules import Finding, Reason

# Bounds follow the error of native PyTorch, which a release of Transformer Engine does not change: those of 2.12.0 and
# 2.20.2 on one H200 differ by a factor of 1.13 at most.
_WIDER: Final = 2.0


@dataclass(frozen=True)
class Baseline:
    """What speed and memory are compared with.

    Attributes:
        stack: id.
        receipts: by probe, those that are good.
        sha256: of the manifest of its store.
    """

    stack: str
    receipts: Mapping[str, Receipt]
    sha256: str


def find_growth(receipt: Receipt, rules: GateRules, baseline: Baseline | None) -> Iterator[Finding]:
    """What is slower or larger than in the baseline; what a red receipt did not come to measure is no fault.

    What cannot be compared is a reason where a baseline is required, and a warning elsewhere.
    """
    for found in _compare(receipt, rules, baseline):
        if isinstance(found, Reason) and found.breaks:
            yield found
        elif receipt.outcome.is_good:
            lacks = isinstance(found, Reason) and rules.kind.baseline != "required"
            yield found.text if isinstance(found, Reason) and lacks else found


def _compare(receipt: Receipt, rules: GateRules, baseline: Baseline | None) -> Iterator[Finding]:
    before = None if baseline is None else baseline.receipts.get(receipt.probe)
    if baseline is None or before is None:
        why = "there is no baseline" if baseline is None else f"the baseline {baseline.stack} has no good receipt of it"
        yield _lacks(f"{why}: its speed and its memory are not compared")
        return
    cards = [(one.machine.gpu, one.machine.capability) for one in (receipt, before)]
    if cards[0] != cards[1]:
        yield _lacks(f"it ran on {cards[0][0] or 'no GPU'}, the baseline on {cards[1][0] or 'no GPU'}: no comparison")
        return
    if lacking := list(_find_unmeasured(receipt, before, rules, baseline)):
        yield _lacks(f"the baseline {baseline.stack} measured no {' and no '.join(lacking)} of it: not compared")
    yield from _find_looser(receipt, before, baseline.stack)
    yield from _find_slower(receipt, before, rules, baseline.stack)
    now, old = receipt.peak_memory_mib, before.peak_memory_mib
    if old > 0.0 and now <= 0.0:
        yield _lacks(f"{baseline.stack} measured its memory, and this receipt does not")
    elif old > 0.0 and now > max(rules.kind.memory * old, old + rules.kind.memory_floor_mib):
        text = f"its peak is {now:.0f} MiB, {old:.0f} MiB in {baseline.stack} (x {now / old:.2f}); at most "
        text += f"x {rules.kind.memory:g}, or {rules.kind.memory_floor_mib:g} MiB more, is allowed"
        yield Reason(GateRule.MEMORY, text)


def _find_looser(receipt: Receipt, before: Receipt, stack: str) -> Iterator[Finding]:
    """What the baseline looked at and this one does not, and bounds that are far wider than they were.

    The same sources make the same checks, so that one that is lost was edited away, or a branch of the probe that a
    release takes: either way it is not proven. Of another commit the suite itself may have changed.
    """
    known, now = _list_parts(before), _list_parts(receipt)
    checks = {check.name for check in receipt.checks}
    lost = sorted({check.name for check in before.checks} - checks)
    lost += sorted(f"{part} of {check}" for check, part in known.keys() - now.keys() if check in checks)
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        text = f"{stack} checked {', '.join(lost[:3])}{more}, and this receipt does not"
        yield _lacks(text) if receipt.commit == before.commit else text
    wider = [
        (part.bound / old.bound, key, old.bound, part.bound)
        for key, part in now.items()
        if (old := known.get(key)) and old.bound and part.bound and not part.at_least
        if part.bound > _WIDER * old.bound
    ]
    if wider:
        _, (check, name), old_bound, bound = max(wider)
        yield f"the bound {name} of {check} is {bound:.3g}, {old_bound:.3g} in {stack}: read its derivation"


def _lacks(text: str) -> Reason:
    return Reason(GateRule.BASELINE, text)


def _list_parts(receipt: Receipt) -> dict[tuple[str, str], Part]:
    return {(check.name, part.name): part for check in receipt.checks for part in check.parts}


def _find_slower(receipt: Receipt, before: Receipt, rules: GateRules, stack: str) -> Iterator[Finding]:
    known, now = _list_timings(before, rules), _list_timings(receipt, rules)
    ratios = {key: row.median_ms / known[key].median_ms for key, row in now.items() if key in known}
    slower = [key for key in sorted(ratios, key=lambda key: -ratios[key]) if ratios[key] > rules.kind.slowdown]
    if slower:
        rows = "; ".join(
            f"{key[0]} {now[key].median_ms:.4g} ms, {known[key].median_ms:.4g} ms in {stack} (x {ratios[key]:.2f})"
            for key in slower
        )
        yield Reason(GateRule.SLOWER, f"slower than x {rules.kind.slowdown:g}: {rows}")
    if known and (new := sorted(name for name, _ in now.keys() - known.keys())):
        yield _lacks(f"{stack} did not time {', '.join(new)}: not compared")
    if lost := sorted(name for name, _ in known.keys() - now.keys()):
        yield _lacks(f"{stack} timed {', '.join(lost)}, and this receipt does not")


def _list_timings(receipt: Receipt, rules: GateRules) -> dict[tuple[str, str], Timing]:
    """Timings of the clocks that are compared; a median of no time at all is none."""
    rows = (row for row in receipt.timings if row.clock in rules.kind.clocks and row.median_ms > 0.0)
    return {(row.name, row.clock): row for row in rows}


def _find_unmeasured(receipt: Receipt, before: Receipt, rules: GateRules, baseline: Baseline) -> Iterator[str]:
    """Quantities that the baseline has not of a cell, where this one has them, or where a GPU's has them of no cell."""

    def list_measured(one: Receipt) -> set[str]:
        return {*(["speed"] if _list_timings(one, rules) else []), *(["memory"] if one.peak_memory_mib > 0.0 else [])}

    has, old = list_measured(receipt), list_measured(before)
    anywhere = {name for one in baseline.receipts.values() for name in list_measured(one)}
    for name in ("speed", "memory"):
        if name not in old and (name in has or (rules.target.arch and name not in anywhere)):
            yield name


def choose_baseline(files: Iterable[ReceiptFile], target: str) -> tuple[ReceiptFile, ...]:
    """The newest good receipt of each cell of a target; one that was only timed counts for none."""
    newest: dict[str, tuple[tuple[str, str], ReceiptFile]] = {}
    for one in files:
        head = one.head
        if head is None or head.target != target or not head.outcome.is_good or head.only_timed:
            continue
        started = read_time(head.started)
        if started is not None and one.stem == head.cell:
            rank = started.isoformat(), one.file
            if head.cell not in newest or rank > newest[head.cell][0]:
                newest[head.cell] = rank, one
    return tuple(one for _, one in sorted(newest.values(), key=lambda row: row[1].file))
