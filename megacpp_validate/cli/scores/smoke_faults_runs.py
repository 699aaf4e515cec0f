"""The verb that plants faults in the smoke run: what it runs, how rows are judged, and the exit code of each answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from ...canary.dynamic.smoke_fault_score import (
    FOUND,
    CellFound,
    CleanResult,
    RunFound,
    SmokeFaultResult,
    SmokeFaultScore,
    SmokeFaultVerdict,
    judge_finding,
)
from ...catalog.bridge import Catalog, SmokeCell, read_catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.smoke_faults import FaultPlan, SmokeFault, SmokeFaults, read_smoke_faults
from ...environments.environment import NoEnvironment
from ...environments.facts import Facts
from ...environments.fleet import Expected
from ...environments.interpreter import read_commit
from ...environments.plan import UnknownTarget, find_target, plan_blank, plan_smoke
from ...environments.restart import FolderTaken
from ...environments.session_result import SessionResult
from ...evidence.receipt import Outcome, Receipt
from ...probes.order import Order
from ..app import TOOL, Exit, Format, foreseen
from ..sessions.session_runs import Asked, run_session
from ..telling import tell


class UnknownFault(ValueError):
    """A fault that there is not."""


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, UnknownFault: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT,
    FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_smoke_faults(
    matrix: Path | None, asked: Asked, faults: tuple[str, ...], fmt: Format, output: Path | None, page: Path | None,
    *, verbose: bool,
) -> None:  # fmt: skip
    """Plant, run, judge; closed where a fault is missed, named wrongly, or a run without one is not green."""
    catalog = read_catalog(matrix)
    known = read_smoke_faults((target.id for target in catalog.targets), matrix)
    score = score_smoke_faults(catalog, choose_faults(known, faults), asked)
    tell(score, fmt, output, verbose=verbose)
    if page is not None:
        tell(score, Format.MARKDOWN, page)
    if score.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if score.lacks else Exit.OPEN)


def choose_faults(known: SmokeFaults, ids: tuple[str, ...]) -> SmokeFaults:
    """Those that are named; all where none is.

    Raises:
        UnknownFault: one that there is not.
    """
    names = [fault.id for fault in known.faults]
    if unknown := [name for name in ids if name not in names]:
        raise UnknownFault(
            f"there is no fault {', '.join(map(repr, unknown))}. Next step: choose from {', '.join(names)}."
        )
    return known.select(ids) if ids else known


def score_smoke_faults(catalog: Catalog, chosen: SmokeFaults, asked: Asked) -> SmokeFaultScore:
    """Run the cells that the target has, and judge every fault. Raises as `run_session`."""
    target = find_target(catalog, asked.target)
    cells = tuple(cell for cell in chosen.cells() if target.id in cell.targets)
    if not cells:
        environment = f"no cell with these faults is of {target.id}"
        results = tuple(_judge(fault, chosen, target, {}, {}) for fault in chosen.faults)
        return SmokeFaultScore(tool=TOOL, target=target.id, environment=environment, faults=results)
    session = _run(catalog, cells, target, asked)
    receipts = {receipt.probe: receipt for receipt in session.receipts}
    found = {} if not session.folder else dict(_read_found(Path(session.folder), receipts))
    return SmokeFaultScore(
        tool=TOOL,
        target=target.id,
        environment=session.interpreter.rpartition("): ")[2],
        faults=tuple(_judge(fault, chosen, target, found, receipts) for fault in chosen.faults),
        clean=tuple(_clean(run, plan) for plan in chosen.plans if plan.id in found for run in found[plan.id].clean),
        seconds=session.seconds,
    )


def _run(catalog: Catalog, cells: tuple[SmokeCell, ...], target: TargetRow, asked: Asked) -> SessionResult:
    """A session of these cells, which are rows of the smoke run for it."""
    holding = catalog.model_copy(update={"smoke": cells})

    def plan(facts: Facts, variables: Mapping[str, str]) -> tuple[Order, ...]:
        blank = plan_blank(target, facts, variables, seed=asked.seed, tool=TOOL, commit=read_commit())
        return plan_smoke(holding, blank, ())

    expected = {cell.id: Expected(cell.seconds, cell.limit_s) for cell in cells}
    return run_session(target, replace(asked, target=target.id), plan, expected)


def _read_found(folder: Path, receipts: Mapping[str, Receipt]) -> Iterator[tuple[str, CellFound]]:
    """What each cell of this session left; one that was ended early left nothing that is whole."""
    for cell, receipt in receipts.items():
        try:
            text = (folder / f"{receipt.cell}.{FOUND}").read_text(encoding="utf-8")
            yield cell, CellFound.model_validate_json(text)
        except (OSError, ValidationError):
            continue


def _judge(
    fault: SmokeFault,
    chosen: SmokeFaults,
    target: TargetRow,
    found: Mapping[str, CellFound],
    receipts: Mapping[str, Receipt],
) -> SmokeFaultResult:
    plan = next(plan for plan in chosen.plans if plan.id == fault.plan)
    run = _find_run(fault, found.get(plan.id))
    wants: dict[str, Any] = dict(fault.names)
    if run is not None:
        verdict, named, reason = judge_finding(fault.caught_by, wants, run.findings)
    else:
        verdict, named, reason = SmokeFaultVerdict.NOT_RUN, None, _why_not(plan, target, receipts.get(plan.id))
    return SmokeFaultResult(
        fault=fault.id,
        planted=fault.fault,
        says=fault.says,
        cell=plan.id,
        title=plan.title,
        ranks=plan.ranks,
        way=fault.way,
        held_out=fault.held_out,
        caught_by=fault.caught_by,
        wants=wants,
        verdict=verdict,
        named=named,
        findings=() if run is None else run.findings,
        reason=reason,
        elsewhere=target.id not in plan.targets,
        seconds=0.0 if run is None else run.seconds,
    )


def _find_run(fault: SmokeFault, found: CellFound | None) -> RunFound | None:
    """The run with this fault; one that was planted as another is no evidence."""
    runs = () if found is None else found.faulty
    return next((run for run in runs if run.run == fault.id and run.fault == fault.fault), None)


def _why_not(plan: FaultPlan, target: TargetRow, receipt: Receipt | None) -> str:
    if target.id not in plan.targets:
        return f"not of {target.id}: its cell takes {plan.ranks} devices of {' or '.join(plan.targets)}"
    if receipt is None or receipt.outcome is Outcome.PASS:
        return "its cell left nothing that can be read"
    return f"its cell is {receipt.outcome.value}: {receipt.reason}"


def _clean(run: RunFound, plan: FaultPlan) -> CleanResult:
    return CleanResult(
        cell=plan.id, title=plan.title, way=run.run, ending=run.ending, findings=run.findings, seconds=run.seconds
    )
