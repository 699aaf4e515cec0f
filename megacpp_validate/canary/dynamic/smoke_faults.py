"""Faults planted between the ranks of the smoke run: which check saw each, and whether it named the place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, JsonValue, ValidationError

from ... import TOOL
from ...catalog.bridge import Catalog
from ...catalog.smoke_faults import SmokeFault, SmokeFaults
from ...environments.host_session import Progress, SessionOptions, run_session
from ...environments.plan import choose_names, find_target, plan_smoke
from ...evidence.receipt import Outcome, Receipt
from ...evidence.values import Frozen
from ...probes.order import Order
from .scores import CleanResult, FaultResult, FaultScore, SmokeFinding, Verdict

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


def run_smoke_faults(
    catalog: Catalog, known: SmokeFaults, ids: Sequence[str], options: SessionOptions, progress: Progress
) -> FaultScore:
    """Run the cells that the target has, and judge every fault. Raises as `run_session`.

    Args:
        ids: of the faults to plant; all where none is named.

    Raises:
        WrongArguments: an id that no row has.
    """
    chosen = known.select(choose_names("fault", [fault.id for fault in known.faults], ids))
    row = find_target(catalog, options.target)
    cells = tuple(cell for cell in chosen.cells() if row.id in cell.targets)
    receipts: dict[str, Receipt] = {}
    found: dict[str, CellFound] = {}
    environment, seconds = f"no cell with these faults belongs to {row.id}", 0.0
    if cells:
        holding = catalog.model_copy(update={"smoke": cells})

        def plan(blank: Order) -> tuple[Order, ...]:
            return plan_smoke(holding, blank, ())

        session = run_session(row, options, plan, progress, cells)
        receipts = {receipt.probe: receipt for receipt in session.receipts}
        for cell, receipt in receipts.items():
            with suppress(OSError, ValidationError):  # a cell that was ended early left nothing that is whole
                place = Path(session.folder, f"{receipt.cell}.{FOUND}")
                found[cell] = CellFound.model_validate_json(place.read_bytes())
        environment, seconds = session.interpreter.rpartition("): ")[2], session.seconds
    return FaultScore(
        schema_id="megacpp-validate/smoke-faults/1",
        tool=TOOL,
        target=row.id,
        environment=environment,
        faults=tuple(_judge(fault, chosen, row.id, found, receipts) for fault in chosen.faults),
        clean=tuple(
            CleanResult(cell=one.id, title=one.title, way=run.run, **run.model_dump(exclude={"run", "fault"}))
            for one in chosen.plans
            if one.id in found
            for run in found[one.id].clean
        ),
        seconds=seconds,
    )


def judge_finding(
    caught_by: str, wants: Mapping[str, JsonValue], findings: Sequence[SmokeFinding]
) -> tuple[Verdict, bool | None, str]:
    """What findings on a run with a fault are worth: verdict, whether the place is named, and why it is not good."""
    right = [finding for finding in findings if finding.check == caught_by]
    if not right and findings:
        others = ", ".join(dict.fromkeys(finding.check for finding in findings))
        return Verdict.BY_ANOTHER, None, f"{caught_by} found nothing; {others} did"
    if not right:
        return Verdict.MISSED, None, "no check found anything"
    wrong = [
        "; ".join(
            f"{key} is {one.named.get(key)!r} and must be {value!r}"
            for key, value in wants.items()
            if key not in one.named or one.named[key] != value
        )
        for one in right
    ]
    return Verdict.CAUGHT, not all(wrong), wrong[0] if all(wrong) else ""


def _judge(
    fault: SmokeFault, chosen: SmokeFaults, target: str, found: Mapping[str, CellFound],
    receipts: Mapping[str, Receipt],
) -> FaultResult:  # fmt: skip
    plan = next(plan for plan in chosen.plans if plan.id == fault.plan)
    runs = found[plan.id].faulty if plan.id in found else ()
    run = next((one for one in runs if (one.run, one.fault) == (fault.id, fault.fault)), None)
    wants: dict[str, Any] = dict(fault.names)
    receipt, elsewhere = receipts.get(plan.id), target not in plan.targets
    verdict, named = Verdict.NOT_RUN, None
    if run is not None:
        verdict, named, reason = judge_finding(fault.caught_by, wants, run.findings)
    elif elsewhere:
        reason = f"not for {target}: its cell takes {plan.ranks} devices of {' or '.join(plan.targets)}"
    elif receipt is None or receipt.outcome is Outcome.PASS:
        reason = "its cell left nothing that can be read"
    else:
        reason = f"its cell is {receipt.outcome.value}: {receipt.reason}"
    return FaultResult(
        fault=fault.id, planted=fault.fault, says=fault.says, cell=plan.id, title=plan.title, ranks=plan.ranks,
        way=fault.way, held_out=fault.held_out, caught_by=fault.caught_by, wants=wants, verdict=verdict, named=named,
        findings=run.findings if run else (), reason=reason, elsewhere=elsewhere, seconds=run.seconds if run else 0.0,
    )  # fmt: skip
