"""The step from one stack to another: modules compared, red ones filed, culprits told. Total and pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from ...catalog.bridge import BridgeModule
from ...catalog.needs import Needs
from ...diagnosis.host_faults import find_host_fault
from ...evidence.receipt import Outcome, Receipt, cell_id
from ...evidence.values import ENVIRONMENT, Cause
from .blame import Case, Order, file_reds, merge_cases, read_order, share_cases, worst_of
from .boundary import is_first_seen, name_boundary
from .compare import compare, has_evidence, is_red
from .culprits import Sides, component_of, say_timing, tell_case, tell_green
from .lost_checks import find_lost_checks, say_lost_checks
from .next_steps import Facts
from .performance import file_slow
from .red import Red
from .shared_layers import share_layers
from .slowdown import SharedSlowdown, split_slowness
from .upgrade_result import Change, Culprit, ModuleChange, StepResult, TimingChange
from .versions import changed_components, compare_versions, release_of
from .watched import Watched, find_watched, join_slow
from .witness import name_the_layer

_NEW: Final = frozenset({Change.REGRESSED, Change.NEW})


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
    modules: Sequence[BridgeModule],
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
    modules: Sequence[BridgeModule],
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
        needs: what releases are known to need, for the next steps; without it they say what the receipts show alone.
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
    good = {name for name, receipt in seen.items() if receipt.outcome.is_good}
    sides = _sides(before.stack, after.stack, old, new, modules, needs)
    cases = [name_the_layer(case, seen) for case in _cases(reds, order, good, sides)]
    culprits, under = _name_red(cases, order, sides)
    culprits = [name_boundary(culprit, reds, good, before.stack) for culprit in culprits]
    watched = find_watched(old, seen, order, {red.module for red in reds})
    green, under_green = _name_green(timings, watched, order, under | {red.module: red.module for red in reds}, sides)
    rows = tuple(
        ModuleChange(
            module=name,
            before=old[name].outcome if name in old else None,
            after=new[name].outcome if name in new else None,
            change=changes[name],
            signature=next((str(red.signature) for red in reds if red.module == name), ""),
            under=under.get(name, under_green.get(name, "")),
            reason=new[name].reason if name in new else _why_lost(name, after, target),
        )
        for name in names
    )
    rank = {ENVIRONMENT: -1} | {name: index for index, name in enumerate(names)}
    return StepResult(
        target=target,
        before=before.stack,
        after=after.stack,
        modules=tuple(_say_unseen(row, old, unseen, before, target) for row in rows),
        culprits=tuple(sorted((*culprits, *green), key=lambda culprit: rank.get(culprit.module, len(names)))),
        timings=tuple(timings),
        versions=sides.facts.versions,
        lost=_lost(rows, new, out, after, target) | _say_hosts(new, hosts) | _say_unchecked(order, sides, new),
    )


def _cases(reds: Sequence[Red], order: Order, good: set[str], sides: Sides) -> tuple[Case, ...]:
    """Red modules filed; what their layers share, in Transformer Engine or below it, is one case."""
    cases = share_cases(share_layers(file_reds(reds, order, good), order), order)
    if not sides.changed:
        return cases
    # The release is the same and something below it is not: that is what broke them, whatever they say.
    groups: dict[str, list[Case]] = {}
    kept: list[Case] = []
    for case in cases:
        if case.first.change in _NEW and not case.first.fits_no_call:
            groups.setdefault(component_of(case.first, sides.changed), []).append(case)
        else:
            kept.append(case)
    return (*kept, *(merge_cases(group, component, order) for component, group in groups.items()))


def _name_red(cases: Sequence[Case], order: Order, sides: Sides) -> tuple[list[Culprit], dict[str, str]]:
    """Culprits, and module -> what it is filed under. What failed in the same way before is nobody's doing now."""
    culprits: list[Culprit] = []
    under: dict[str, str] = {}
    for case in cases:
        name = ENVIRONMENT if case.shared is not None else case.first.module
        filed = case.members if case.shared is not None else case.others
        under |= {red.module: name for red in filed}
        if case.first.change in _NEW and not is_first_seen(case.first, order):
            culprits.append(tell_case(case, sides))
    return culprits, under


def _name_green(
    timings: Sequence[TimingChange], watched: Sequence[Watched], order: Order, red: Mapping[str, str], sides: Sides
) -> tuple[list[Culprit], dict[str, str]]:
    """Culprits that are good, slower or changed, and module -> what it is filed under.

    What all share is a lower clock, which explains no kernel, no compile and no memory.
    """
    slowness = split_slowness(timings)
    found = [_tell_shared(shared, sides) for shared in slowness.shared if shared.changes]
    under = {row.module: ENVIRONMENT for shared in slowness.shared for row in shared.changes}
    for green in join_slow(watched, file_slow(slowness.own, order, red, timings), order):
        culprit = tell_green(green, sides)
        found.append(culprit)
        under |= dict.fromkeys(culprit.cascades, culprit.module)
    return found, under


def _tell_shared(shared: SharedSlowdown, sides: Sides) -> Culprit:
    component = next(iter(sides.changed), "") if len(sides.changed) == 1 else ""
    return Culprit(
        module=ENVIRONMENT,
        cause=Cause.PERFORMANCE,
        component=component,
        signature=f"slower by {shared.factor:.2f}: {', '.join(shared.modules)}",
        summary=shared.summary,
        evidence=tuple(say_timing(row) for row in shared.changes),
        next_step="look at the clocks, the temperature and what else runs on this machine, and time both stacks again; "
        f"stay on {sides.facts.before} if it lasts",
        cascades=shared.modules,
    )


def _sides(
    before: str,
    after: str,
    old: Mapping[str, Receipt],
    new: Mapping[str, Receipt],
    modules: Sequence[BridgeModule],
    needs: Needs | None,
) -> Sides:
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
    """Blocked cells that nothing red stands behind, or what failed in the same way before, while they held.

    What met a fault of the host is not red.
    """
    shown = (receipt for name, receipt in new.items() if name not in hosts)
    red = {receipt.cell: receipt for receipt in shown if is_red(receipt) and receipt.outcome is not Outcome.BLOCKED}
    by_cell = {receipt.cell: receipt for receipt in new.values()}

    def find_behind(receipt: Receipt) -> Receipt | None:
        met: set[str] = set()
        while receipt.outcome is Outcome.BLOCKED and receipt.cell not in met:
            met.add(receipt.cell)
            if receipt.blocked_by in red:
                return red[receipt.blocked_by]
            following = by_cell.get(receipt.blocked_by)
            if following is None:
                return None
            receipt = following
        return None

    def is_out(name: str, receipt: Receipt) -> bool:
        behind = find_behind(receipt)
        if behind is None:
            return True
        held = name in old and old[name].outcome.is_good
        return held and compare(old.get(behind.probe), behind) is Change.SAME_FAILURE

    return {name for name, one in new.items() if one.outcome is Outcome.BLOCKED and is_out(name, one)}


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
    row: ModuleChange, old: Mapping[str, Receipt], hosts: Mapping[str, str], before: StackReceipts, target: str
) -> ModuleChange:
    """A good cell with nothing to compare it with says so: that it broke is not known, nor that it did not."""
    name = row.module
    if row.change is not Change.NEW or row.after is None or not row.after.is_good:
        return row
    if name in hosts:
        why = f"a fault of the host: {hosts[name]}"
    else:
        why = old[name].reason or "it was not run" if name in old else _why_lost(name, before, target)
    said = f"nothing on {before.stack} to compare it with: {why}"
    return row.model_copy(update={"reason": "; ".join(filter(None, (row.reason, said)))})


def _say_hosts(new: Mapping[str, Receipt], hosts: Mapping[str, str]) -> dict[str, str]:
    return {new[name].cell: f"a fault of the host: {fault} ({new[name].reason})" for name, fault in hosts.items()}


def _say_unchecked(order: Order, sides: Sides, new: Mapping[str, Receipt]) -> dict[str, str]:
    """Modules that hold, and of which less was looked at than before."""
    both = [name for name in order.names if name in sides.before and name in new]
    lost = {new[name].cell: find_lost_checks(sides.before[name], new[name]) for name in both}
    return {cell: say_lost_checks(names, sides.facts.before) for cell, names in lost.items() if names}


def _why_lost(name: str, after: StackReceipts, target: str) -> str:
    return after.unreadable.get(cell_id(after.stack, target, name), "there is no receipt")


__all__ = ["StackReceipts", "compare_all", "compare_stacks"]
