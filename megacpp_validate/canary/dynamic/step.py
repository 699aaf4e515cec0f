"""The step from one stack to another: modules compared, red ones filed, culprits named. Total and pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import Field

from ...catalog.bridge import BridgeModule
from ...catalog.images import Needs
from ...diagnosis.blame import Change, Red, find_blockers, has_evidence, is_red, read_order
from ...diagnosis.checks import USES
from ...diagnosis.culprits import Culprit, file_cases, name_culprits
from ...diagnosis.diagnose import find_host_fault, is_same, sign
from ...diagnosis.next_steps import Sides, VersionChange, compare_versions, release_of
from ...evidence.receipt import Outcome, Receipt, cell_id
from ...evidence.values import ENVIRONMENT, Frozen
from .slowdown import TimingChange, name_changed, name_shared, split_slowness

_SHOWN: Final = 3  # lost checks that are named


class ModuleChange(Frozen):
    """One bridge module between two stacks.

    Attributes:
        before, after: outcomes; None where there is no valid receipt.
        signature: of the failure that is seen now; empty where there is none.
        under: the culprit that it is filed under; empty where it is no cascade.
        reason: what the receipt says now.
    """

    module: str
    before: Outcome | None
    after: Outcome | None
    change: Change
    signature: str = ""
    under: str = ""
    reason: str = ""


class StepResult(Frozen):
    """The step from one stack to another on one target.

    Attributes:
        modules: in dependency order, then compositions by name.
        culprits: in dependency order; nobody where nothing regressed.
        timings: every use that was timed on both sides.
        versions: what else than the release changed.
        lost: cells without evidence now, each with why. Lost evidence is never a pass.
    """

    schema_id: Literal["megacpp-validate/step/1"] = "megacpp-validate/step/1"
    target: str
    before: str
    after: str
    modules: tuple[ModuleChange, ...]
    culprits: tuple[Culprit, ...] = ()
    timings: tuple[TimingChange, ...] = ()
    versions: tuple[VersionChange, ...] = ()
    lost: dict[str, str] = Field(default_factory=dict)

    @property
    def breaks(self) -> bool:
        """Whether somebody is to blame."""
        return bool(self.culprits)


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

    def select(self, target: str) -> dict[str, Receipt]:
        """One receipt a probe of the target, but those of cells of which a file cannot be read."""
        mine = (one for one in self.receipts if one.target == target and one.cell not in self.unreadable)
        return {one.probe: one for one in sorted(mine, key=is_red)}  # a red one comes last, and counts


def compare(before: Receipt | None, after: Receipt | None) -> Change:
    """How a cell changed.

    A blocked cell is as red as what blocks it. Only where it had a failure of its own before is that one out of sight
    now, and so lost. What passed and now says that it is not supported no longer shows that it holds: that is lost as
    well.

    Args:
        before, after: of the same probe; None where there is no valid receipt.
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
        needs: what releases are known to need; without it next steps come from the receipts alone.
    """
    targets = [receipt.target for receipt in (*after.receipts, *before.receipts)]
    target = target or max(sorted(set(targets)), key=targets.count, default="")
    known = _Known(before, after, target)
    old, seen, order = known.old, known.seen, read_order(modules)
    names = (*order.names, *sorted((old.keys() | known.new.keys()) - set(order.names)))
    changes = {name: compare(old.get(name), seen.get(name)) for name in names}
    reds = [Red(name, seen[name], changes[name], old.get(name)) for name in names if is_red(seen.get(name))]
    sides = _read_sides(known, modules, needs)
    culprits, under = name_culprits(file_cases(reds, seen, order, sides), seen, order, sides)
    signatures = {red.module: str(red.signature) for red in reds}
    slowness = split_slowness(timings)
    green = name_changed(old, seen, slowness.own, order, signatures, sides)
    shared = [name_shared(slowness, sides)] if slowness.shared else []
    slower = dict.fromkeys((row.module for row in slowness.shared), ENVIRONMENT)
    slower |= {name: culprit.module for culprit in green for name in culprit.cascades}
    rank = {ENVIRONMENT: -1} | {name: index for index, name in enumerate(names)}
    named = sorted((*culprits, *shared, *green), key=lambda culprit: rank.get(culprit.module, len(names)))
    lost = {cell_id(after.stack, target, one): why for one in names if (why := known.find_lost(one, changes[one]))}
    rows = [
        ModuleChange(
            module=name, before=old[name].outcome if name in old else None,
            after=known.new[name].outcome if name in known.new else None, change=changes[name],
            signature=signatures.get(name, ""), under=under.get(name, slower.get(name, "")),
            reason=known.explain(name),
        )
        for name in names
    ]  # fmt: skip
    return StepResult(
        target=target, before=before.stack, after=after.stack, modules=tuple(rows), culprits=tuple(named),
        timings=tuple(timings), versions=sides.versions, lost=lost,
    )  # fmt: skip


class _Known:
    """What is known of each cell, by probe: receipts of both sides, faults of the host, and what shows nothing.

    Attributes:
        old: receipts before, without those of a fault of the host.
        new, seen: receipts now, and those that show something of the step.
        hosts: probe -> the fault of the host that its receipt now met.
    """

    def __init__(self, before: StackReceipts, after: StackReceipts, target: str) -> None:
        self.before, self.after, self.target = before, after, target
        self.old = {name: one for name, one in before.select(target).items() if not find_host_fault(one)}
        self.new = new = after.select(target)
        self.hosts = {name: fault for name, receipt in new.items() if (fault := find_host_fault(receipt))}
        hidden = set(self.hosts)
        for name, blocker in find_blockers(new, self.hosts).items():  # nothing red blocks it, or what failed before
            held = name in self.old and self.old[name].outcome.is_good
            if blocker is None or (held and compare(self.old.get(blocker.probe), blocker) is Change.SAME_FAILURE):
                hidden.add(name)
        self.seen = {name: receipt for name, receipt in new.items() if name not in hidden}

    def find_lost(self, name: str, change: Change) -> str:
        """Why there is no evidence of a cell now, or less than before; empty where there is."""
        receipt, reason = self.new.get(name), self.explain(name)
        if name in self.hosts:
            return f"a fault of the host: {self.hosts[name]} ({reason})"
        if receipt is None or not has_evidence(receipt) or name not in self.seen or change is Change.LOST:
            return reason or "it was not run"
        if name in self.old and name in USES and (checks := find_lost_checks(self.old[name], receipt)):
            more = f" and {len(checks) - _SHOWN} more" if len(checks) > _SHOWN else ""
            return f"{self.before.stack} checked {', '.join(checks[:_SHOWN])}{more}, and this receipt does not"
        return ""

    def explain(self, name: str) -> str:
        """The reason of a cell, or why it has no receipt."""
        if name in self.new:
            return self.new[name].reason
        return self.after.unreadable.get(cell_id(self.after.stack, self.target, name), "there is no receipt")


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


def _read_sides(known: _Known, modules: Sequence[BridgeModule], needs: Needs | None) -> Sides:
    versions = compare_versions(known.old, known.new)
    release = release_of(known.old)
    same = bool(release) and release == release_of(known.new)
    files = {module.id: tuple(module.files) for module in modules}
    return Sides(known.before.stack, known.after.stack, same, versions, files, needs)
