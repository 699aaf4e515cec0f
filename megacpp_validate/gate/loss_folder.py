"""Verdicts on the curves that training left in a folder: each recipe of each cell against that cell's BF16."""

from __future__ import annotations

from pathlib import Path

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.evidence.loss_curve_folder import CurveSet, read_curves

from .loss import decide_loss
from .loss_pairs import REFERENCE
from .loss_result import LossOutcome, LossVerdict


def decide_curves(folder: Path) -> tuple[LossVerdict, ...]:
    """The verdict on every FP8 recipe of every cell that left curves in a folder; none where there is no curve.

    A file that is no curve refuses the whole recipe that it is named after, and every recipe where it is BF16's.

    Raises:
        CurveInvalid: there is no such folder.
    """
    return tuple(verdict for each in read_curves(folder) for verdict in decide_set(each))


def decide_set(curves: CurveSet) -> tuple[LossVerdict, ...]:
    """The verdicts on the recipes of one cell."""
    lost: dict[str, list[str]] = {}
    for fault in curves.unreadable:
        lost.setdefault(_recipe_of(Path(fault.source)), []).append(str(fault))
    held: dict[str, list[LossCurve]] = {}
    for curve in curves.curves:
        held.setdefault(curve.recipe, []).append(curve)
    recipes = sorted((held.keys() | lost.keys()) - {REFERENCE})
    if not recipes:
        said = f"there are curves of {REFERENCE} alone; next step: train the FP8 recipes too"
        return (_refuse(curves.of, "", [*lost.get(REFERENCE, ()), said]),)
    verdicts = []
    for recipe in recipes:
        if faults := [*lost.get(REFERENCE, ()), *lost.get(recipe, ())]:
            verdicts.append(_refuse(curves.of, recipe, faults))
            continue
        others = [curve for curve in curves.curves if curve.recipe not in (REFERENCE, recipe)]
        verdict = decide_loss(held.get(REFERENCE, []), held[recipe], others)
        verdicts.append(verdict.model_copy(update={"of": curves.of}))
    return tuple(verdicts)


def _refuse(of: str, recipe: str, reasons: list[str]) -> LossVerdict:
    return LossVerdict(of=of, recipe=recipe, outcome=LossOutcome.REFUSED, refusals=tuple(reasons))


def _recipe_of(path: Path) -> str:
    """The recipe that a file is named after, as far as it says one."""
    return path.stem.rpartition(".")[2].rpartition("-")[0]
