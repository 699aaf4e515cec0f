"""Which faults of the low-precision stack are planted, what runs on each copy, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...catalog.fp8_faults import Fp8Fault
from ...evidence.receipt import Outcome, Receipt
from .fp8_fault_score import CellSeen, Fp8FaultResult, Fp8Verdict
from .te_fault_plan import UnknownFault
from .te_fault_verdict import Troubles

CLEAN: Final[Mapping[bool, str]] = {True: "clean-quick", False: "clean-whole"}
"""Names of the runs of a copy without a fault, by whether the smallest shapes ran."""


@dataclass(frozen=True)
class Fp8CopyRun:
    """Some cells once, in one copy of a release.

    Attributes:
        name: of its folder below that of the release.
        fault: what is planted; None in a clean copy.
        cells: ids of those that run.
        quick: whether with the smallest shapes.
    """

    name: str
    fault: Fp8Fault | None
    cells: tuple[str, ...]
    quick: bool


@dataclass(frozen=True)
class Fp8Plan:
    """What is planted in one release, in the order of the matrix."""

    release: str
    faults: tuple[Fp8Fault, ...]

    @property
    def runs(self) -> tuple[Fp8CopyRun, ...]:
        """Clean copies with every cell that a fault names, then each fault with its own cells."""
        clean = []
        for quick, name in CLEAN.items():
            named = [cell for row in self.faults if row.quick is quick for cell in _cells_of(row)]
            if named:
                clean.append(Fp8CopyRun(name, None, tuple(dict.fromkeys(named)), quick))
        return (*clean, *map(self.run_of, self.faults))

    def run_of(self, fault: Fp8Fault) -> Fp8CopyRun:
        """The run of a fault."""
        return Fp8CopyRun(f"faults/{fault.id}", fault, _cells_of(fault), fault.quick)


def _cells_of(fault: Fp8Fault) -> tuple[str, ...]:
    return (*fault.cells, fault.green)


def plan_fp8_faults(faults: Sequence[Fp8Fault], release: str, wanted: Collection[str] = ()) -> Fp8Plan:
    """What is planted in a release.

    Args:
        faults: of the matrix.
        release: of Transformer Engine.
        wanted: ids; all of the release where there is none.

    Raises:
        UnknownFault: an id or a release that there is not.
    """
    known = {fault.id: fault for fault in faults}
    if unknown := sorted(set(wanted) - set(known)):
        raise UnknownFault(
            f"there is no fault {', '.join(map(repr, unknown))}. Next step: choose from {', '.join(known)}."
        )
    releases = sorted({one for fault in faults for one in fault.releases})
    chosen = tuple(fault for fault in faults if release in fault.releases and (not wanted or fault.id in wanted))
    if not chosen:
        raise UnknownFault(
            f"none of these faults is written for Transformer Engine {release}. Next step: choose a release of "
            f"{', '.join(releases)}, or give rows of the matrix a text for this one."
        )
    return Fp8Plan(release, chosen)


Receipts = Mapping[str, Receipt]
"""Receipts of one run by probe."""


def judge_fp8_plan(plan: Fp8Plan, seen: Mapping[str, Receipts], troubles: Troubles) -> tuple[Fp8FaultResult, ...]:
    """Judge every fault of a plan.

    Args:
        plan: what was planned.
        seen: receipts by name of the run; a run without any is one that did not run.
        troubles: why runs have no receipts.
    """
    return tuple(_judge(plan, fault, seen, troubles) for fault in plan.faults)


def _judge(plan: Fp8Plan, fault: Fp8Fault, seen: Mapping[str, Receipts], troubles: Troubles) -> Fp8FaultResult:
    run = plan.run_of(fault)
    receipts, clean = seen.get(run.name, {}), seen.get(CLEAN[fault.quick], {})
    cells = tuple(_look(fault, cell, receipts.get(cell)) for cell in fault.cells)
    green = _look(fault, fault.green, receipts.get(fault.green))
    trouble = troubles.not_run.get(run.name) or troubles.everything or _why_no_judge(run, clean)
    if run.name in troubles.not_planted:
        verdict, reason = Fp8Verdict.NOT_PLANTED, troubles.not_planted[run.name]
    elif trouble:
        verdict, reason = Fp8Verdict.NOT_RUN, trouble
    else:
        verdict, reason = _judge_cells(cells)
    if not trouble and green.is_red:
        failed = ", ".join([*green.right, *green.others]) or green.reason
        reason = "; ".join(filter(None, (reason, f"{green.cell}, which must stay green, is red by {failed}")))
    return Fp8FaultResult(
        fault=fault.id,
        release=plan.release,
        says=fault.says,
        verdict=verdict,
        wants=tuple(fault.checks),
        cells=cells,
        green=None if trouble else green,
        reason=reason,
        seconds=round(sum(receipt.seconds.get("total", 0.0) for receipt in receipts.values()), 1),
    )


def _why_no_judge(run: Fp8CopyRun, clean: Receipts) -> str:
    """Why a copy cannot be judged beside the clean one: that one lacks a cell, or is red by itself."""
    missing = [cell for cell in run.cells if cell not in clean or clean[cell].outcome is Outcome.NOT_RUN]
    if missing:
        said = "; ".join(clean[cell].reason for cell in missing if cell in clean)
        return f"the clean copy has no evidence of {', '.join(missing)}" + (f": {said}" if said else "")
    if red := [cell for cell in run.cells if not clean[cell].outcome.is_good]:
        return f"the clean copy is red by itself in {', '.join(red)}: there is nothing to compare with"
    return ""


def _look(fault: Fp8Fault, cell: str, receipt: Receipt | None) -> CellSeen:
    if receipt is None:
        return CellSeen(cell=cell, outcome=None, reason="there is no receipt of it")
    failed = [check.name for check in receipt.checks if not check.passed]
    if receipt.failure is not None:
        failed.append(f"raised {receipt.failure.type}")
    return CellSeen(
        cell=cell,
        outcome=receipt.outcome,
        right=tuple(name for name in failed if fault.wants(name)),
        others=tuple(name for name in failed if not fault.wants(name)),
        reason=receipt.reason,
    )


def _judge_cells(cells: Sequence[CellSeen]) -> tuple[Fp8Verdict, str]:
    if lost := [cell for cell in cells if not cell.ran]:
        return Fp8Verdict.NOT_RUN, "no evidence of " + "; ".join(f"{cell.cell}: {cell.reason}" for cell in lost)
    green = ", ".join(cell.cell for cell in cells if not cell.is_red)
    if not any(cell.is_red for cell in cells):
        return Fp8Verdict.MISSED, f"{green}: as in the clean copy"
    blind = [cell for cell in cells if cell.is_red and not cell.right]
    said = [f"{green} stays green"] if green else []
    said += [f"{cell.cell} is red by {', '.join(cell.others) or cell.reason}" for cell in blind]
    return (Fp8Verdict.BY_ANOTHER, "; ".join(said)) if said else (Fp8Verdict.CAUGHT, "")
