"""The verb that plants faults in the low-precision stack: copies are made, cells of FP8 run on each, and are judged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from ...canary.dynamic.fp8_fault_plan import Fp8Plan, judge_fp8_plan, plan_fp8_faults
from ...canary.dynamic.fp8_fault_score import Fp8FaultResult, Fp8FaultScore
from ...canary.dynamic.te_fault_plan import UnknownFault
from ...canary.dynamic.te_fault_verdict import Troubles
from ...catalog.bridge import Catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.fp8_faults import read_fp8_faults
from ...environments.cell import Cell
from ...environments.environment import NoEnvironment
from ...environments.faulty_overlay import NoClean
from ...environments.interpreter import read_commit
from ...environments.plan import UnknownTarget, find_target, plan_blank, plan_fp8
from ...environments.restart import FolderTaken
from ...environments.schedule import CONTEXT_MIB, Need
from ..app import TOOL, Exit, Format, foreseen, refuse_receipts
from ..telling import tell
from .faulty_copies import CopyHost, open_copies, read_run, run_copies


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    faults: tuple[str, ...]
    releases: tuple[str, ...]
    held_out: bool
    target: str
    overlays: tuple[Path, ...]
    receipts: Path
    copies: Path | None
    judge_only: bool
    seed: int
    jobs: int
    limit_s: float
    python: str


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, UnknownFault: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT,
    NoClean: Exit.NO_ENVIRONMENT, FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_fp8_faults(
    catalog: Catalog, matrix: Path | None, asked: Asked, fmt: Format, output: Path | None, *, verbose: bool
) -> None:
    """Plant, run, judge; closed where the right check does not see a fault, and not open where anything did not run."""
    started = time.monotonic()
    target = find_target(catalog, asked.target)
    known = read_fp8_faults((cell.id for cell in catalog.fp8), matrix, held_out=asked.held_out)
    plans = [plan_fp8_faults(known, one, asked.faults) for one in asked.releases or (catalog.pinned.te,)]
    faults: list[Fp8FaultResult] = []
    places = []
    for plan in plans:
        troubles = Troubles()
        folder = asked.receipts.absolute() / f"te{plan.release}"
        try:
            places.append(
                f"receipts of {folder}" if asked.judge_only else _run(catalog, target, plan, asked, folder, troubles)
            )
        except OSError as fault:
            refuse_receipts(asked.receipts, fault)
        # What an earlier run left is no answer where this one did not run at all.
        seen = {} if troubles.everything else {run.name: read_run(folder / run.name) for run in plan.runs}
        faults += judge_fp8_plan(plan, seen, troubles)
    score = Fp8FaultScore(
        tool=TOOL,
        target=target.id,
        environment="; ".join(dict.fromkeys(places)),
        held_out=asked.held_out,
        faults=tuple(faults),
        seconds=round(time.monotonic() - started, 1),
    )
    tell(score, fmt, output, verbose=verbose)
    if score.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if score.lacks else Exit.OPEN)


def _run(catalog: Catalog, target: TargetRow, plan: Fp8Plan, asked: Asked, folder: Path, troubles: Troubles) -> str:
    """Make every copy and run every cell that has no receipt yet; where that was, or why it was not."""

    def cells(host: CopyHost) -> Iterator[tuple[Cell, Need]]:
        return _make_cells(catalog, target, plan, asked, host, folder, troubles)

    return run_copies(target, plan.release, asked, folder, troubles, cells)


def _make_cells(
    catalog: Catalog, target: TargetRow, plan: Fp8Plan, asked: Asked, host: CopyHost, folder: Path, troubles: Troubles
) -> Iterator[tuple[Cell, Need]]:  # fmt: skip
    """The cells of every run whose copy can be made."""
    rows = {row.id: row for row in catalog.fp8}
    blank = plan_blank(target, host.facts, host.bare.variables, seed=asked.seed, tool=TOOL, commit=read_commit())
    orders = {order.probe: order for order in plan_fp8(catalog, blank, ())}
    opened = open_copies(host, [(run.name, run.fault, run.fault is not None) for run in plan.runs], troubles)
    for run in plan.runs:
        if run.name not in opened:
            continue
        copy = opened[run.name]
        for name in run.cells:
            row = rows[name]
            order = replace(orders[name], quick=run.quick, environment=copy.identity)
            limit = asked.limit_s if run.quick else max(asked.limit_s, row.limit_s)
            need = Need(row.gpu_memory_mib + CONTEXT_MIB, row.seconds)
            yield Cell(copy.environment, order, folder / run.name, limit), need
