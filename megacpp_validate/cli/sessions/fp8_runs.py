"""The verb of FP8: what it runs, and the exit code of each answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import typer

from ...catalog.bridge import Catalog, Fp8Cell, read_catalog
from ...environments.environment import NoEnvironment
from ...environments.facts import Facts
from ...environments.fleet import Expected
from ...environments.interpreter import read_commit
from ...environments.plan import UnknownTarget, choose_fp8_cells, find_target, plan_blank, plan_fp8
from ...environments.restart import FolderTaken
from ...environments.session_result import SessionResult
from ...evidence.receipt import Outcome
from ...gate.fp8_session import Fp8Result
from ...gate.loss_folder import decide_curves
from ...gate.loss_result import LossVerdict
from ...probes.order import Order
from ..app import TOOL, Exit, Format, foreseen, refuse
from ..gate.policy_runs import decide_policy, read_today
from ..telling import tell
from .session_runs import Asked, run_session

_TRAINING: Final = "fp8.loss"  # code of the cells that leave curves


@foreseen({
    UnknownTarget: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT, FolderTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_fp8(matrix: Path | None, asked: Asked, fmt: Format, output: Path | None, *, verbose: bool) -> None:
    """A session; closed where anything is red, and not open where anything did not run."""
    if asked.probes == ():
        refuse("no cell is selected. Next step: name one, or leave --probes out for all.", Exit.NOTHING_SELECTED)
    result = observe_fp8(read_catalog(matrix), matrix, asked)
    tell(result, fmt, output, verbose=verbose)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.OPEN if result.holds else Exit.EVIDENCE_MISSING)


def observe_fp8(catalog: Catalog, matrix: Path | None, asked: Asked) -> Fp8Result:
    """Run the cells, and judge the curves that training left beside their receipts. Raises as `run_session`."""
    target = find_target(catalog, asked.target)

    def plan(facts: Facts, variables: Mapping[str, str]) -> tuple[Order, ...]:
        blank = plan_blank(target, facts, variables, seed=asked.seed, tool=TOOL, commit=read_commit())
        return plan_fp8(catalog, blank, asked.probes or ())

    rows = choose_fp8_cells(catalog, asked.probes or ())
    policy = decide_policy(matrix, read_today())  # first: a file of the matrix that is wrong must not cost a session
    session = run_session(target, asked, plan, {row.id: Expected(row.seconds, row.limit_s) for row in rows})
    verdicts, missing = _judge_losses(session, rows)
    return Fp8Result(**dict(session), loss=verdicts, loss_missing=missing, policy=policy)


def _judge_losses(session: SessionResult, rows: Iterable[Fp8Cell]) -> tuple[tuple[LossVerdict, ...], str]:
    """The verdicts on the curves that this session's training left, and why there is none where there should be."""
    asked = {row.id: row.settings.get("recipes", "").split() for row in rows if row.code == _TRAINING}
    trained = {receipt.cell: receipt for receipt in session.receipts if receipt.probe in asked}
    if not any(receipt.outcome in (Outcome.PASS, Outcome.FAIL) for receipt in trained.values()):
        return (), ""  # not selected, or it did not come to an end: the cell says so
    verdicts = tuple(verdict for verdict in decide_curves(Path(session.folder)) if verdict.of in trained)
    judged = {(verdict.of, verdict.recipe) for verdict in verdicts}
    missing = []
    for cell, receipt in trained.items():
        silent = [recipe for recipe in asked[receipt.probe] if (cell, recipe) not in judged]
        if silent and receipt.outcome is Outcome.PASS:
            missing.append(f"{cell} left no curve of {', '.join(silent)}")
    return verdicts, "; ".join(missing)
