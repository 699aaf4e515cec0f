"""The step from one stack to another: modules compared, red ones filed, culprits named. Total and pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from ...diagnosis.blame import (
    Change,
    Module,
    Order,
    Red,
    find_blockers,
    has_evidence,
    is_red,
    read_order,
    worst_of,
)
from ...diagnosis.culprits import Culprit, Sides, file_cases, name_culprits
from ...diagnosis.diagnose import find_host_fault, is_same, sign
from ...diagnosis.next_steps import Facts, Needs, changed_components, compare_versions, release_of
from ...evidence.receipt import Outcome, Receipt, cell_id
from ...evidence.values import ENVIRONMENT
from .slowdown import split_slowness
from .upgrade_result import ModuleChange, StepResult, TimingChange
from .watched import Watched, find_watched, name_green, name_shared

_SHOWN: Final = 3  # lost checks that are named


def compare(before: Receipt | None, after: Receipt | None) -> Change:
    """What became of a cell.

    A blocked cell is as red as what blocks it. Only where it had a failure of its own before is that one out of sight
    now, and so lost. What passed and now says that it is not supported no longer shows that it holds: that is lost as
    well.

    Args:
        before, after: of the same probe; None where there is no receipt that can be believed.
    """
    if after is None or not has_evidence(after):
        return Change.LOST if has_evidence(before) else Change.UNCHANGED
    if before is None or not has_evidence(before):
        return Change.NEW
    if before.outcome is Outcome.PASS and after.outcome is Outcome.EXPECTED_UNSUPPORTED:
        return Change.LOST
    if after.outcome.is_good:
        return Change.UNCHANGED if before.outcome.is_good else Change.FIXED
    if before.outcome.is_good:
        return Change.REGRESSED
    if is_same(sign(before), sign(after)):
        return Change.SAME_FAILURE
    hidden = after.outcome is Outcome.BLOCKED and before.outcome is not Outcome.BLOCKED
    return Change.LOST if hidden else Change.NEW


@dataclass(frozen=True)
class StackReceipts:
    """What one stack left.

    Attributes:
        stack: its id.
        receipts: in any order; several of one probe are the red one of them.
        unreadable: cell -> what is wrong with its file: that cell is lost.
    """

    stack: str
    receipts: tuple[Receipt, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)


Timings = Callable[[StackReceipts, StackReceipts], Sequence[TimingChange]]


def compare_all(
    stacks: Sequence[StackReceipts],
    modules: Sequence[Module],
    timings: Timings = lambda *_: (),
    *,
    target: str = "",
    needs: Needs | None = None,
) -> tuple[StepResult, ...]:
    """Every step between adjacent stacks.

    Args:
        stacks: oldest first.
        modules: in dependency order.
        timings: gives the rows of a step.
        target, needs: as in `compare_stacks`.
    """
    return tuple(
        compare_stacks(one, other, modules, timings(one, other), target=target, needs=needs)
        for one, other in pairwise(stacks)
    )


def compare_stacks(
    before: StackReceipts,
    after: StackReceipts,
    modules: Sequence[Module],
    timings: Sequence[TimingChange] = (),
    *,
    target: str = "",
    needs: Needs | None = None,
) -> StepResult:
    """The step from one stack to another. Never raises, whichever receipts there are.

    Args:
        before, after: receipts of another target are left out.
        modules: in dependency order.
        timings: every use that was timed on both sides.
        target: id; that of the receipts without it.
        needs: what releases are known to need; without it next steps say what the receipts show alone.
    """
    target = target or _target_of((*after.receipts, *before.receipts))
    old, new = (_believed(side, target) for side in (before, after))
    unseen = _find_hosts(old)
    old = {name: receipt for name, receipt in old.items() if name not in unseen}
    order = read_order(modules)
    names = (*order.names, *sorted((old.keys() | new.keys()) - set(order.names)))
    hosts = _find_hosts(new)
    out = hosts.keys() | _out_of_sight(old, new, hosts)  # ended by the host; blocked by what says nothing of the step
    seen = {name: receipt for name, receipt in new.items() if name not in out}
    changes = {name: compare(old.get(name), seen.get(name)) for name in names}
    reds = [Red(name, seen[name], changes[name], old.get(name)) for name in names if is_red(seen.get(name))]
    sides = _sides(before.stack, after.stack, old, new, modules, needs)
    culprits, under = name_culprits(file_cases(reds, seen, order, sides), seen, order, sides)
    signatures = {red.module: str(red.signature) for red in reds}
    watched = find_watched(old, seen, order, signatures)
    green, slower = _name_green(watched, timings, order, signatures, sides)
    reasons = {name: receipt.reason for name, receipt in new.items()}
    reasons |= _say_unseen(changes, seen, old, unseen, before, target)
    rows = tuple(
        ModuleChange(
            module=name,
            before=old[name].outcome if name in old else None,
            after=new[name].outcome if name in new else None,
            change=changes[name],
            signature=signatures.get(name, ""),
            under=under.get(name, slower.get(name, "")),
            reason=reasons[name] if name in new else _why_lost(name, after, target),
        )
        for name in names
    )
    rank = {ENVIRONMENT: -1} | {name: index for index, name in enumerate(names)}
    return StepResult(
        target=target,
        before=before.stack,
        after=after.stack,
        modules=rows,
        culprits=tuple(sorted((*culprits, *green), key=lambda culprit: rank.get(culprit.module, len(names)))),
        timings=tuple(timings),
        versions=sides.facts.versions,
        lost=_lost(rows, new, out, after, target) | _say_hosts(new, hosts) | _find_unchecked(order, sides, new),
    )


def _name_green(
    watched: Sequence[Watched], timings: Sequence[TimingChange], order: Order, red: Collection[str], sides: Sides
) -> tuple[list[Culprit], dict[str, str]]:
    """Culprits that are good, slower or changed, and module -> what it is filed under."""
    slowness = split_slowness(timings)
    shared = [name_shared(one, sides) for one in slowness.shared if one.changes]
    under = {row.module: ENVIRONMENT for one in slowness.shared for row in one.changes}
    own = name_green(watched, slowness.own, timings, order, red, sides)
    for culprit in own:
        under |= dict.fromkeys(culprit.cascades, culprit.module)
    return [*shared, *own], under


def _sides(
    before: str, after: str, old: Mapping[str, Receipt], new: Mapping[str, Receipt], modules: Sequence[Module],
    needs: Needs | None,
) -> Sides:  # fmt: skip
    versions = compare_versions(old, new)
    releases = release_of(old), release_of(new)
    same = bool(releases[0]) and releases[0] == releases[1]
    facts = Facts(before, after, held=True, same_release=same, versions=versions, needs=needs)
    files = {module.id: tuple(module.files) for module in modules}
    return Sides(facts, old, changed_components(versions) if same else (), files)


def _believed(side: StackReceipts, target: str) -> dict[str, Receipt]:
    """One receipt a probe of the target, but those of cells of which a file cannot be read."""
    mine = [receipt for receipt in side.receipts if receipt.target == target and receipt.cell not in side.unreadable]
    return worst_of(mine)


def _target_of(receipts: Iterable[Receipt]) -> str:
    targets = [receipt.target for receipt in receipts]
    return max(sorted(set(targets)), key=targets.count, default="")


def _find_hosts(receipts: Mapping[str, Receipt]) -> dict[str, str]:
    """Module -> the fault of the host that its receipt met."""
    return {name: fault for name, receipt in receipts.items() if (fault := find_host_fault(receipt))}


def _out_of_sight(old: Mapping[str, Receipt], new: Mapping[str, Receipt], hosts: Collection[str]) -> set[str]:
    """Blocked cells that nothing red stands behind, or what failed in the same way before, while they held."""
    out = set()
    for name, behind in find_blockers(new, hosts).items():
        held = name in old and old[name].outcome.is_good
        known = behind is not None and compare(old.get(behind.probe), behind) is Change.SAME_FAILURE
        if behind is None or (held and known):
            out.add(name)
    return out


def _lost(
    rows: Iterable[ModuleChange], new: Mapping[str, Receipt], out: set[str], after: StackReceipts, target: str
) -> dict[str, str]:
    """Cells without evidence now, each with why."""
    lost = {}
    for row in rows:
        receipt = new.get(row.module)
        if receipt is None:
            lost[cell_id(after.stack, target, row.module)] = _why_lost(row.module, after, target)
        elif not has_evidence(receipt) or row.module in out or row.change is Change.LOST:
            lost[receipt.cell] = receipt.reason or "it was not run"
    return lost


def _say_unseen(
    changes: Mapping[str, Change], seen: Mapping[str, Receipt], old: Mapping[str, Receipt], hosts: Mapping[str, str],
    before: StackReceipts, target: str,
) -> dict[str, str]:  # fmt: skip
    """Why nothing is known of good cells without a receipt to compare them with, by module."""
    said = {}
    for name, receipt in seen.items():
        if changes[name] is Change.NEW and receipt.outcome.is_good:
            why = _why_lost(name, before, target)
            if name in hosts:
                why = f"a fault of the host: {hosts[name]}"
            elif name in old:
                why = old[name].reason or "it was not run"
            compared = f"nothing on {before.stack} to compare it with: {why}"
            said[name] = "; ".join(filter(None, (receipt.reason, compared)))
    return said


def _say_hosts(new: Mapping[str, Receipt], hosts: Mapping[str, str]) -> dict[str, str]:
    return {new[name].cell: f"a fault of the host: {fault} ({new[name].reason})" for name, fault in hosts.items()}


def _find_unchecked(order: Order, sides: Sides, new: Mapping[str, Receipt]) -> dict[str, str]:
    """Cells that hold, and of which less was looked at than before, each with which checks: a skip is no success."""
    found = {}
    for name in order.names:
        if name in sides.before and name in new and (lost := find_lost_checks(sides.before[name], new[name])):
            more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
            checked = f"{sides.facts.before} checked {', '.join(lost[:_SHOWN])}{more}"
            found[new[name].cell] = f"{checked}, and this receipt does not"
    return found


def find_lost_checks(before: Receipt, after: Receipt) -> tuple[str, ...]:
    """Checks that a good cell made before and does not make now, in their order.

    Empty where other checks were to be expected: of another commit, seed or path that was requested, of a second
    backend that the receipt says is gone. Speed checks may be left out by a run.
    """
    good = before.outcome is Outcome.PASS and after.outcome is Outcome.PASS
    alike = before.commit == after.commit != "" and before.seed == after.seed and before.requested == after.requested
    if not good or not alike:
        return ()
    made = {check.name for check in after.checks}
    absent = {row.requested for row in after.backends if not row.claimed and not row.observed}
    lost = (check.name for check in before.checks if check.name not in made)
    return tuple(name for name in lost if not absent & {*name.split(".")} and not name.startswith("speed."))


def _why_lost(name: str, after: StackReceipts, target: str) -> str:
    return after.unreadable.get(cell_id(after.stack, target, name), "there is no receipt")


__all__ = ["StackReceipts", "compare_all", "compare_stacks"]
