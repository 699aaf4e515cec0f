"""The verb of the loss gate: whose curves it judges, and the exit code of each answer."""

from __future__ import annotations

from pathlib import Path

import typer

from ...evidence.loss_curve_file import CurveInvalid
from ...gate.loss_folder import decide_curves
from ...gate.loss_result import LossGateResult
from ..app import TOOL, Exit, Format, foreseen
from ..telling import tell

__all__ = ["decide_curves", "judge_folder", "run_loss_gate"]


@foreseen({CurveInvalid: Exit.WRONG_ARGUMENTS})
def run_loss_gate(folder: Path, fmt: Format, output: Path | None, *, verbose: bool) -> None:
    """Judge and tell; closed where a recipe fails, and not open where curves are missing, damaged or of other data."""
    result = judge_folder(folder)
    tell(result, fmt, output, verbose=verbose)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.OPEN if result.holds else Exit.EVIDENCE_MISSING)


def judge_folder(folder: Path) -> LossGateResult:
    """The verdicts on a folder.

    Raises:
        CurveInvalid: there is no such folder.
    """
    return LossGateResult(tool=TOOL, folder=str(folder), verdicts=decide_curves(folder))
