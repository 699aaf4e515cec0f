"""The verb of the blame score: copies are made, every probe is run on each, and the blame of each is judged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from ...canary.dynamic.blame_score import BlameScore
from ...canary.dynamic.te_fault_plan import Plan, UnknownFault, plan_score
from ...canary.dynamic.te_fault_verdict import Troubles, judge_plan
from ...catalog.bridge import Catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.te_faults import read_te_faults
from ...environments.cell import Cell
from ...environments.environment import NoEnvironment
from ...environments.faulty_overlay import NoClean
from ...environments.interpreter import read_commit
from ...environments.plan import UnknownTarget, find_target, plan_blank, plan_parity
from ...environments.restart import FolderTaken
from ...environments.schedule import Need, expect_need
from ...evidence.receipt import Receipt
from ..app import TOOL, Exit, Format, foreseen, refuse_receipts
from ..telling import tell
from .faulty_copies import CopyHost, open_copies, read_run, run_copies


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    faults: tuple[str, ...]
    release: str
    shard: str
    clean: int
    timed_clean: int
    target: str
    overlays: tuple[Path, ...]
    receipts: Path
    earlier: tuple[Path, ...]
    copies: Path | None
    judge_only: bool
    seed: int
    jobs: int
    limit_s: float
    python: str

    @property
    def of_n(self) -> tuple[int, int]:
        """The shard as numbers; (0, 0), which there is not, where it has another form."""
        one, _, n = self.shard.partition("/")
        return (int(one), int(n)) if one.isdecimal() and n.isdecimal() else (0, 0)


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, UnknownFault: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT,
    NoClean: Exit.NO_ENVIRONMENT, FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_blame_score(
    catalog: Catalog, matrix: Path | None, asked: Asked, fmt: Format, output: Path | None, *, verbose: bool
) -> None:
    """Plant, run, judge; closed where somebody else is blamed, and not open where anything did not run."""
    started = time.monotonic()
    target = find_target(catalog, asked.target)
    modules = tuple(module.id for module in catalog.modules)
    plan = plan_score(
        read_te_faults(modules, matrix), asked.release or catalog.pinned.te, asked.faults, shard=asked.of_n,
        controls=asked.clean, timed_controls=asked.timed_clean, seed=asked.seed,
    )  # fmt: skip
    folder = asked.receipts.absolute() / f"te{plan.release}"
    troubles = Troubles()
    try:
        where = f"receipts of {folder}" if asked.judge_only else _run(catalog, target, plan, asked, folder, troubles)
    except OSError as fault:
        refuse_receipts(asked.receipts, fault)
    verdicts = judge_plan(plan, _read_runs(plan, folder, troubles), catalog.modules, troubles)
    for place in reversed(asked.earlier):
        runs = _read_runs(plan, place.absolute() / folder.name, Troubles())
        verdicts = judge_plan(plan, runs, catalog.modules, Troubles()).joined(verdicts)
    where += "".join(f"; receipts of {place}" for place in asked.earlier)
    score = BlameScore(
        tool=TOOL,
        target=target.id,
        environment=where,
        modules=modules,
        faults=verdicts.faults,
        controls=verdicts.controls,
        seconds=round(time.monotonic() - started, 1),
    )
    tell(score, fmt, output, verbose=verbose)
    if score.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if score.lacks else Exit.OPEN)


# --- the runs ---------------------------------------------------------------------------------------------


def _run(catalog: Catalog, target: TargetRow, plan: Plan, asked: Asked, folder: Path, troubles: Troubles) -> str:
    """Make every copy and run every cell that has no receipt yet; where that was, or why it was not."""

    def cells(host: CopyHost) -> Iterator[tuple[Cell, Need]]:
        return _make_cells(catalog, target, plan, asked, host, folder, troubles)

    return run_copies(target, plan.release, asked, folder, troubles, cells, _timed_last)


def _timed_last(cells: Sequence[tuple[Cell, Need]]) -> Iterator[list[tuple[Cell, Need]]]:
    """What times waits for what computes to end: one after the other, nobody waits long."""
    for timed in (False, True):
        yield [(cell, need) for cell, need in cells if cell.order.times is timed]


def _make_cells(
    catalog: Catalog, target: TargetRow, plan: Plan, asked: Asked, host: CopyHost, folder: Path, troubles: Troubles
) -> Iterator[tuple[Cell, Need]]:  # fmt: skip
    """The cells of every run whose copy can be made."""
    rows = {module.id: module for module in catalog.modules}
    turnstile = folder / "turnstile"
    blank = plan_blank(target, host.facts, host.bare.variables, tool=TOOL, commit=read_commit())
    orders = plan_parity(catalog, blank, ())

    opened = open_copies(host, [(run.name, run.fault, run.copied) for run in plan.runs], troubles)
    for run in plan.runs:
        if run.name not in opened:
            continue
        copy = opened[run.name]
        for order in orders:
            own = replace(
                order, seed=run.seed, quick=True, times=run.times, only_times=run.times,
                turnstile=str(turnstile), environment=copy.identity,
            )  # fmt: skip
            cell = Cell(copy.environment, own, folder / run.name, asked.limit_s)
            yield cell, expect_need(own, rows[own.probe], {})


# --- what came of it --------------------------------------------------------------------------------------


def _read_runs(plan: Plan, folder: Path, troubles: Troubles) -> dict[str, dict[str, Receipt]]:
    """Receipts of every run by probe; what an earlier run left is no answer where this one did not run at all."""
    return {} if troubles.everything else {run.name: read_run(folder / run.name) for run in plan.runs}
