"""Faults planted between the ranks of the smoke run: which check saw each, and whether it named the place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, JsonValue, ValidationError

from ... import TOOL
from ...catalog.bridge import Catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.smoke_faults import FaultPlan, SmokeFault, SmokeFaults
from ...environments.host_session import Progress, SessionOptions, run_session
from ...environments.plan import find_target, plan_smoke
from ...errors import WrongArguments
from ...evidence.receipt import Outcome, Receipt
from ...evidence.values import Frozen
from ...probes.order import Order
from .scores import CleanResult, SmokeFaultResult, SmokeFaultScore, SmokeFinding, Verdict

FOUND: Final = "found.json"  # beside the receipt of a cell: `CellFound`


class RunFound(Frozen):
    """One run of a cell: the fault's id, or of a run without one the way that it took.

    Attributes:
        fault: as it was planted; empty for none.
        ending: as the launcher said it.
        seconds: wall time, of all processes that it took.
    """

    run: str
    fault: str
    ending: str
    findings: tuple[SmokeFinding, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)


class CellFound(Frozen):
    """What a cell leaves beside its receipt."""

    schema_id: Literal["megacpp-validate/smoke-found/1"] = "megacpp-validate/smoke-found/1"
    cell: str
    clean: tuple[RunFound, ...]
    faulty: tuple[RunFound, ...]


def choose_smoke_faults(known: SmokeFaults, ids: Sequence[str]) -> SmokeFaults:
    """Those that are named; all where none is.

    Raises:
        WrongArguments: an id that no row has.
    """
    names = [fault.id for fault in known.faults]
    if unknown := [name for name in ids if name not in names]:
        raise WrongArguments(
            f"there is no fault {', '.join(map(repr, unknown))}. Next step: choose from {', '.join(names)}."
        )
    return known.select(ids) if ids else known


def run_smoke_faults(
    catalog: Catalog, chosen: SmokeFaults, options: SessionOptions, progress: Progress
) -> SmokeFaultScore:
    """Run the cells that the target has, and judge every fault. Raises as `run_session`."""
    row = find_target(catalog, options.target)
    cells = tuple(cell for cell in chosen.cells() if row.id in cell.targets)
    if not cells:
        return SmokeFaultScore(
            tool=TOOL,
            target=row.id,
            environment=f"no cell with these faults belongs to {row.id}",
            faults=tuple(_judge(fault, chosen, row, {}, {}) for fault in chosen.faults),
        )
    holding = catalog.model_copy(update={"smoke": cells})

    def plan(blank: Order) -> tuple[Order, ...]:
        return plan_smoke(holding, blank, ())

    session = run_session(row, options, plan, progress, cells)
    receipts = {receipt.probe: receipt for receipt in session.receipts}
    found = dict(_read_found(Path(session.folder), receipts)) if session.folder else {}
    return SmokeFaultScore(
        tool=TOOL,
        target=row.id,
        environment=session.interpreter.rpartition("): ")[2],
        faults=tuple(_judge(fault, chosen, row, found, receipts) for fault in chosen.faults),
        clean=tuple(
            CleanResult(
                cell=one.id, title=one.title, way=run.run, ending=run.ending, findings=run.findings, seconds=run.seconds
            )
            for one in chosen.plans
            if one.id in found
            for run in found[one.id].clean
        ),
        seconds=session.seconds,
    )


def judge_finding(
    caught_by: str, wants: Mapping[str, JsonValue], findings: tuple[SmokeFinding, ...]
) -> tuple[Verdict, bool | None, str]:
    """What findings on a run with a fault are worth: verdict, whether the place is named, and why it is not good."""
    right = [finding for finding in findings if finding.check == caught_by]
    if not right:
        others = ", ".join(dict.fromkeys(finding.check for finding in findings))
        if others:
            return Verdict.BY_ANOTHER, None, f"{caught_by} found nothing; {others} did"
        return Verdict.MISSED, None, "no check found anything"
    wrong = [
        [
            f"{key} is {one.named.get(key)!r} and must be {value!r}"
            for key, value in wants.items()
            if key not in one.named or one.named[key] != value
        ]
        for one in right
    ]
    return Verdict.CAUGHT, not all(wrong), "; ".join(wrong[0]) if all(wrong) else ""


def _read_found(folder: Path, receipts: Mapping[str, Receipt]) -> Iterator[tuple[str, CellFound]]:
    """What each cell of this session left; one that was ended early left nothing that is whole."""
    for cell, receipt in receipts.items():
        try:
            yield cell, CellFound.model_validate_json((folder / f"{receipt.cell}.{FOUND}").read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            continue


def _judge(
    fault: SmokeFault, chosen: SmokeFaults, target: TargetRow, found: Mapping[str, CellFound],
    receipts: Mapping[str, Receipt],
) -> SmokeFaultResult:  # fmt: skip
    plan = next(plan for plan in chosen.plans if plan.id == fault.plan)
    runs = found[plan.id].faulty if plan.id in found else ()
    run = next((one for one in runs if (one.run, one.fault) == (fault.id, fault.fault)), None)
    wants: dict[str, Any] = dict(fault.names)
    if run is not None:
        verdict, named, reason = judge_finding(fault.caught_by, wants, run.findings)
    else:
        verdict, named, reason = Verdict.NOT_RUN, None, _why_not(plan, target, receipts.get(plan.id))
    return SmokeFaultResult(
        fault=fault.id, planted=fault.fault, says=fault.says, cell=plan.id, title=plan.title, ranks=plan.ranks,
        way=fault.way, held_out=fault.held_out, caught_by=fault.caught_by, wants=wants, verdict=verdict, named=named,
        findings=run.findings if run else (), reason=reason, elsewhere=target.id not in plan.targets,
        seconds=run.seconds if run else 0.0,
    )  # fmt: skip


def _why_not(plan: FaultPlan, target: TargetRow, receipt: Receipt | None) -> str:
    if target.id not in plan.targets:
        return f"not for {target.id}: its cell takes {plan.ranks} devices of {' or '.join(plan.targets)}"
    if receipt is None or receipt.outcome is Outcome.PASS:
        return "its cell left nothing that can be read"
    return f"its cell is {receipt.outcome.value}: {receipt.reason}"


__all__ = ["FOUND", "CellFound", "RunFound", "choose_smoke_faults", "judge_finding", "run_smoke_faults"]
