"""Speed and memory of a release beside those of the one before it. Pure.

How much slower or larger is too much is a rule: `slowdown`, `memory` and `memory_floor_mib` of matrix/gate.toml, with
where the numbers come from. Whether a step is beyond the noise of one card is for the canary to say, which has two runs
of one stack to measure it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ..catalog.gate import GateRules
from ..evidence.receipt import Receipt, Timing
from ..evidence.receipt_time import read_time
from ..evidence.release_gate import GateRule
from ..evidence.store import ReceiptFile
from .release_asked import Baseline, Reason
from .release_checks import Found

# Bounds follow the error of native PyTorch, which a release of Transformer Engine does not change: those of 2.12.0 and
# 2.20.2 on one H200 differ by a factor of 1.13 at most.
_WIDER: Final = 2.0


def find_growth(receipt: Receipt, rules: GateRules, baseline: Baseline | None) -> Iterator[Found]:
    """What is slower or larger than in the baseline; what a red one did not come to measure is no fault."""
    for found in _compare(receipt, rules, baseline):
        if receipt.outcome.is_good or (isinstance(found, Reason) and found.breaks):
            yield found


def _compare(receipt: Receipt, rules: GateRules, baseline: Baseline | None) -> Iterator[Found]:
    before = None if baseline is None else baseline.receipts.get(receipt.probe)
    wanted = rules.kind.baseline == "required"
    if baseline is None or before is None:
        said = (
            "there is no baseline" if baseline is None else f"the baseline {baseline.stack} has no good receipt of it"
        )
        said += ": its speed and its memory are not compared"
        yield Reason(GateRule.BASELINE, said) if wanted else said
        return
    if _card(receipt) != _card(before):
        said = f"it ran on {_say_card(receipt)}, the baseline on {_say_card(before)}: times of two cards tell nothing"
        yield Reason(GateRule.BASELINE, said) if wanted else said
        return
    if lacking := list(_find_unmeasured(receipt, before, rules, baseline)):
        said = f"the baseline {baseline.stack} measured no {' and no '.join(lacking)} of it: that is not compared"
        yield Reason(GateRule.BASELINE, said) if wanted else said
    yield from _find_looser(receipt, before, rules, baseline.stack)
    yield from _find_slower(receipt, before, rules, baseline.stack)
    yield from _find_larger(receipt, before, rules, baseline.stack)


def _find_looser(receipt: Receipt, before: Receipt, rules: GateRules, stack: str) -> Iterator[Found]:
    """What the baseline looked at and this one does not, and bounds that are far wider than they were.

    The same sources make the same checks, so that one that is lost was edited away, or a branch of the probe that a
    release takes: either way it is not proven. Of another commit the suite itself may have changed, which is told.
    """
    known = {(check.name, part.name): part for check in before.checks for part in check.parts}
    now = {(check.name, part.name): part for check in receipt.checks for part in check.parts}
    checks = {check.name for check in receipt.checks}
    lost = sorted({check.name for check in before.checks} - checks)
    lost += sorted(f"{part} of {check}" for check, part in known.keys() - now.keys() if check in checks)
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        said = f"{stack} checked {', '.join(lost[:3])}{more}, and this receipt does not"
        same = receipt.commit == before.commit
        yield Reason(GateRule.BASELINE, said) if same and rules.kind.baseline == "required" else said
    wider = [
        (key, before_part.bound, part.bound)
        for key, part in now.items()
        if (before_part := known.get(key)) and before_part.bound and part.bound and not part.at_least
        if part.bound > _WIDER * before_part.bound
    ]
    if wider:
        (check, name), old, new = max(wider, key=lambda row: row[2] / row[1])
        more = f", the widest of {len(wider)}" if len(wider) > 1 else ""
        yield f"the bound {name} of {check} is {new:.3g}, {old:.3g} in {stack}{more}: look at how it was derived"


def _find_slower(receipt: Receipt, before: Receipt, rules: GateRules, stack: str) -> Iterator[Found]:
    known = {(row.name, row.clock): row for row in _judged(before, rules)}
    slower: list[tuple[float, str]] = []
    now = {(row.name, row.clock): row for row in _judged(receipt, rules)}
    for key, row in now.items():
        old = known.get(key)
        if old is not None and row.median_ms > rules.kind.slowdown * old.median_ms:
            ratio = row.median_ms / old.median_ms
            slower.append(
                (ratio, f"{row.name} {row.median_ms:.4g} ms, {old.median_ms:.4g} ms in {stack} (x {ratio:.2f})")
            )
    if slower:
        told = "; ".join(text for _, text in sorted(slower, reverse=True))
        yield Reason(GateRule.SLOWER, f"slower than x {rules.kind.slowdown:g}: {told}")
    if known and (new := sorted(name for name, clock in now.keys() - known.keys())):
        said = f"{stack} did not time {', '.join(new)}: that is not compared"
        yield Reason(GateRule.BASELINE, said) if rules.kind.baseline == "required" else said
    if lost := sorted(name for name, clock in known.keys() - now.keys()):
        said = f"{stack} timed {', '.join(lost)}, and this receipt does not"
        yield Reason(GateRule.BASELINE, said) if rules.kind.baseline == "required" else said


def _find_larger(receipt: Receipt, before: Receipt, rules: GateRules, stack: str) -> Iterator[Found]:
    now, old = receipt.peak_memory_mib, before.peak_memory_mib
    if old > 0.0 and now <= 0.0:
        said = f"{stack} measured its memory, and this receipt does not"
        yield Reason(GateRule.BASELINE, said) if rules.kind.baseline == "required" else said
    elif old > 0.0 and now > max(rules.kind.memory * old, old + rules.kind.memory_floor_mib):
        said = f"its peak is {now:.0f} MiB, {old:.0f} MiB in {stack} (x {now / old:.2f})"
        most = f"x {rules.kind.memory:g} is the most, or {rules.kind.memory_floor_mib:g} MiB more"
        yield Reason(GateRule.MEMORY, f"{said}; {most}")


def _judged(receipt: Receipt, rules: GateRules) -> Iterator[Timing]:
    """Timings of the clocks that are compared; a median of no time at all is none."""
    return (row for row in receipt.timings if row.clock in rules.kind.clocks and row.median_ms > 0.0)


def _find_unmeasured(receipt: Receipt, before: Receipt, rules: GateRules, baseline: Baseline) -> Iterator[str]:
    """Quantities that the baseline has not of a cell, where this one has them, or where a GPU's has them of no cell."""
    kinds: dict[str, Callable[[Receipt], bool]] = {
        "speed": lambda one: any(_judged(one, rules)),
        "memory": lambda one: one.peak_memory_mib > 0.0,
    }
    for name, has in kinds.items():
        nowhere = bool(rules.target.arch) and not any(map(has, baseline.receipts.values()))
        if not has(before) and (nowhere or has(receipt)):
            yield name


def _card(receipt: Receipt) -> tuple[str, str]:
    return receipt.machine.gpu, receipt.machine.capability


def _say_card(receipt: Receipt) -> str:
    return receipt.machine.gpu or "no GPU"


def choose_baseline(seen: Iterable[ReceiptFile], target: str) -> tuple[ReceiptFile, ...]:
    """The newest good receipt of each cell of a target; one that was only timed counts for none."""
    newest: dict[str, tuple[tuple[str, str], ReceiptFile]] = {}
    for one in seen:
        head = one.head
        if head is None or head.target != target:
            continue
        if not head.outcome.is_good or head.only_timed:
            continue
        started = read_time(head.started)
        if started is None or one.stem != head.cell:
            continue
        rank = started.isoformat(), one.file
        if head.cell not in newest or rank > newest[head.cell][0]:
            newest[head.cell] = rank, one
    return tuple(one for _, one in sorted(newest.values(), key=lambda row: row[1].file))
