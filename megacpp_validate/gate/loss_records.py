"""What must be on record before curves are judged: recipes that are known, what the layers held, and what trained them.

Here a curve is refused, not failed: without these nothing is known of the recipe. So is a reference that is damaged, or
that cast to FP8 itself: whatever follows it does not follow BF16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from megacpp_validate.evidence.loss_curve import CURVE_SCHEMA_ID, LossCurve

from .loss_observed import CASTS
from .loss_pairs import REFERENCE, find_damage
from .loss_statistics import CAP, smooth

MADE_WITH: Final = ("gpu", "torch", "transformer_engine")  # what every curve says, and all say alike


def find_wrong_records(reference: Sequence[LossCurve], candidate: Sequence[LossCurve]) -> tuple[str, ...]:
    """Why the records of these curves allow no verdict; each says what to do. Empty if they do."""
    curves = (*reference, *candidate)
    return (
        *_find_unknown_recipes(candidate),
        *_find_old_records(curves),
        *_find_wrong_references(reference),
        *_find_other_makers(curves),
    )


def _find_unknown_recipes(candidate: Sequence[LossCurve]) -> Iterator[str]:
    if unknown := sorted({curve.recipe for curve in candidate} - CASTS.keys() - {REFERENCE}):
        yield (
            f"how {', '.join(map(repr, unknown))} casts is not known, but of {', '.join(CASTS)} alone; next step: give "
            "it the curves of one of those"
        )


def _find_old_records(curves: Sequence[LossCurve]) -> Iterator[str]:
    if old := [curve for curve in curves if curve.schema_id != CURVE_SCHEMA_ID]:
        yield (
            f"{len(old)} of {len(curves)} runs left no record of what their layers held, the first is "
            f"{_name(old[0])}, a {old[0].schema_id}; next step: train again, which leaves a {CURVE_SCHEMA_ID} of each"
        )


def _find_wrong_references(reference: Sequence[LossCurve]) -> Iterator[str]:
    for curve in reference:
        if curve.recipe != REFERENCE:
            continue
        if damage := find_damage(curve):
            yield f"{_name(curve)} is damaged: {'; '.join(damage)}; next step: train it again"
        elif why := _find_no_learning(curve):
            yield f"{_name(curve)} is no reference: {why}; next step: mend the training in {REFERENCE} first"
        if curve.quantizers or curve.histories:
            layers = sorted({row.layer for row in curve.quantizers})
            seen = f"casts in {', '.join(layers[:3])}" if layers else "histories of amax"
            yield (
                f"{_name(curve)} trained in low precision itself, {seen} were seen: it is no reference; next step: "
                "train it outside of every FP8 scope"
            )


def _find_no_learning(curve: LossCurve) -> str:
    """Why a whole run of BF16 shows nothing: where nothing is learned, nothing can be lost; empty where it shows it.

    It falls by more than FP8 may be off by, and ends no more than that above its lowest, in means of a tenth of the
    run; with four deviations of such a mean, of steps that differ as neighbours do.
    """
    window = max(curve.planned // 10, 1)
    means = smooth(curve.losses, window)
    lowest = min(means)
    fall, rise = means[0] - lowest, means[-1] - lowest
    if not fall > CAP:
        return f"its smoothed loss falls by {fall:.4f} nats, and what is looked for is {CAP}"
    jumps = [(after - before) * (after - before) / 2 for before, after in pairwise(curve.losses)]
    noise = math.sqrt(sum(jumps) / len(jumps) / window)
    if not rise <= CAP + 4 * noise:
        return f"its smoothed loss ends {rise:.4f} nats above its lowest: it diverged"
    return ""


def _find_other_makers(curves: Sequence[LossCurve]) -> Iterator[str]:
    recent = [curve for curve in curves if curve.schema_id == CURVE_SCHEMA_ID]  # the others have no such record
    for what in MADE_WITH:
        if lacking := [_name(curve) for curve in recent if not curve.made_with.get(what)]:
            yield f"{lacking[0]} does not say its {what}; next step: train it again where that is there to be told"
    for what in sorted({key for curve in curves for key in curve.made_with}):
        said = sorted({curve.made_with[what] for curve in curves if what in curve.made_with})
        if what not in MADE_WITH and (lacking := [_name(one) for one in recent if what not in one.made_with]):
            yield f"{lacking[0]} does not say its {what}, and others do; next step: train all of them in one place"
        if len(said) > 1:
            yield f"the runs had different {what}: {' and '.join(said)}; next step: train all of them in one place"


def _name(curve: LossCurve) -> str:
    return f"the run of {curve.recipe} with seed {curve.seed}"
