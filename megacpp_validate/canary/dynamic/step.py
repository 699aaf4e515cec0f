"""The step from one stack to another: modules compared, red ones filed, culprits named. Total and pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...diagnosis.blame import Change, Module, Red, find_blockers, has_evidence, is_red, read_order, worst_of
from ...diagnosis.checks import USES
from ...diagnosis.culprits import Sides, file_cases, name_culprits
from ...diagnosis.diagnose import find_host_fault, is_same, sign
from ...diagnosis.next_steps import Facts, Needs, changed_components, compare_versions, release_of
from ...evidence.receipt import Outcome, Receipt, cell_id
from ...evidence.values import ENVIRONMENT
from .slowdown import find_watched, name_green, name_shared, split_slowness
from .upgrade_result import ModuleChange, StepResult, TimingChange

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
        needs: what releases are known to need; without it next steps come from the receipts alone.
    """
    targets = [receipt.target for receipt in (*after.receipts, *before.receipts)]
    target = target or max(sorted(set(targets)), key=targets.count, default="")
    old, new = (_select(side, target) for side in (before, after))
    old_hosts, hosts = _find_hosts(old), _find_hosts(new)
    old = {name: receipt for name, receipt in old.items() if name not in old_hosts}
    order = read_order(modules)
    names = (*order.names, *sorted((old.keys() | new.keys()) - set(order.names)))
    hidden = hosts.keys() | _find_hidden(old, new, hosts)
    seen = {name: receipt for name, receipt in new.items() if name not in hidden}
    changes = {name: compare(old.get(name), seen.get(name)) for name in names}
    reds = [Red(name, seen[name], changes[name], old.get(name)) for name in names if is_red(seen.get(name))]
    good = {name for name, receipt in seen.items() if receipt.outcome.is_good}
    sides = _read_sides(before.stack, after.stack, old, new, modules, needs)
    culprits, under = name_culprits(file_cases(reds, seen, order, sides), seen, order, sides)
    signatures = {red.module: str(red.signature) for red in reds}
    slowness = split_slowness(timings)
    green = name_green(find_watched(old, seen, order, signatures), slowness.own, timings, order, signatures, sides)
    shared = [name_shared(one, sides) for one in slowness.shared if one.changes]
    slower = {row.module: ENVIRONMENT for one in slowness.shared for row in one.changes}
    slower |= {name: culprit.module for culprit in green for name in culprit.cascades}
    rank = {ENVIRONMENT: -1} | {name: index for index, name in enumerate(names)}
    named = sorted((*culprits, *shared, *green), key=lambda culprit: rank.get(culprit.module, len(names)))
    known = _Known(before, after, target, old, new, old_hosts, hosts, hidden)
    lost = {known.cell(name): why for name in names if (why := known.find_lost(name, changes[name]))}
    rows = [
        ModuleChange(
            module=name, before=old[name].outcome if name in old else None,
            after=new[name].outcome if name in new else None, change=changes[name],
            signature=signatures.get(name, ""), under=under.get(name, slower.get(name, "")),
            reason=known.explain(name, is_new=changes[name] is Change.NEW and name in good),
        )
        for name in names
    ]  # fmt: skip
    return StepResult(
        target=target, before=before.stack, after=after.stack, modules=tuple(rows), culprits=tuple(named),
        timings=tuple(timings), versions=sides.facts.versions, lost=lost,
    )  # fmt: skip


@dataclass(frozen=True)
class _Known:
    """What is known of each cell, by probe: receipts of both sides, faults of the host, and what shows nothing."""

    before: StackReceipts
    after: StackReceipts
    target: str
    old: Mapping[str, Receipt]
    new: Mapping[str, Receipt]
    old_hosts: Mapping[str, str]
    hosts: Mapping[str, str]
    hidden: Collection[str]

    def cell(self, name: str) -> str:
        """The id of a cell of the new side."""
        return cell_id(self.after.stack, self.target, name)

    def find_lost(self, name: str, change: Change) -> str:
        """Why there is no evidence of a cell now, or less than before; empty where there is."""
        receipt, reason = self.new.get(name), self.explain(name)
        if name in self.hosts:
            return f"a fault of the host: {self.hosts[name]} ({reason})"
        if receipt is None or not has_evidence(receipt) or name in self.hidden or change is Change.LOST:
            return reason or "it was not run"
        if name in self.old and name in USES and (checks := find_lost_checks(self.old[name], receipt)):
            more = f" and {len(checks) - _SHOWN} more" if len(checks) > _SHOWN else ""
            return f"{self.before.stack} checked {', '.join(checks[:_SHOWN])}{more}, and this receipt does not"
        return ""

    def explain(self, name: str, *, is_new: bool = False) -> str:
        """The reason of a cell, and for a good one that is new why there is nothing to compare it with."""
        receipt = self.new.get(name)
        reason = receipt.reason if receipt else _why_lost(name, self.after, self.target)
        if not is_new:
            return reason
        why = _why_lost(name, self.before, self.target)
        if name in self.old_hosts:
            why = f"a fault of the host: {self.old_hosts[name]}"
        elif name in self.old:
            why = self.old[name].reason or "it was not run"
        return "; ".join(filter(None, (reason, f"nothing on {self.before.stack} to compare it with: {why}")))


def find_lost_checks(before: Receipt, after: Receipt) -> tuple[str, ...]:
    """Checks that a good cell made before and does not make now, in their order: a skip is no success.

    Empty where other checks were to be expected: of another commit, seed or path that was requested, of a second
    backend that the receipt reports as gone. Speed checks may be left out by a run.
    """
    good = before.outcome is Outcome.PASS and after.outcome is Outcome.PASS
    alike = before.commit == after.commit != "" and before.seed == after.seed and before.requested == after.requested
    if not good or not alike:
        return ()
    made = {check.name for check in after.checks}
    absent = {row.requested for row in after.backends if not row.claimed and not row.observed}
    lost = (check.name for check in before.checks if check.name not in made)
    return tuple(name for name in lost if not absent & {*name.split(".")} and not name.startswith("speed."))


def _select(side: StackReceipts, target: str) -> dict[str, Receipt]:
    """One receipt a probe of the target, but those of cells of which a file cannot be read."""
    mine = [receipt for receipt in side.receipts if receipt.target == target and receipt.cell not in side.unreadable]
    return worst_of(mine)


def _read_sides(
    before: str, after: str, old: Mapping[str, Receipt], new: Mapping[str, Receipt], modules: Sequence[Module],
    needs: Needs | None,
) -> Sides:  # fmt: skip
    versions = compare_versions(old, new)
    release = release_of(old)
    same = bool(release) and release == release_of(new)
    facts = Facts(before, after, held=True, same_release=same, versions=versions, needs=needs)
    files = {module.id: tuple(module.files) for module in modules}
    return Sides(facts, old, changed_components(versions) if same else (), files)


def _find_hosts(receipts: Mapping[str, Receipt]) -> dict[str, str]:
    """Module -> the fault of the host that its receipt met."""
    return {name: fault for name, receipt in receipts.items() if (fault := find_host_fault(receipt))}


def _find_hidden(old: Mapping[str, Receipt], new: Mapping[str, Receipt], hosts: Collection[str]) -> set[str]:
    """Blocked cells that show nothing of the step: nothing red blocks them, or what failed in the same way before."""
    hidden = set()
    for name, blocker in find_blockers(new, hosts).items():
        held = name in old and old[name].outcome.is_good
        if blocker is None or (held and compare(old.get(blocker.probe), blocker) is Change.SAME_FAILURE):
            hidden.add(name)
    return hidden


def _why_lost(name: str, side: StackReceipts, target: str) -> str:
    return side.unreadable.get(cell_id(side.stack, target, name), "there is no receipt")
