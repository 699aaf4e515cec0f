"""What the layers held while they trained: the casts of each recipe, and how delayed scaling moved.

These checks stand beside those of the curves, and take nothing from them: a cast that is right and a loss that is off
fails, and so does a loss that follows while the wrong format ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from megacpp_validate.evidence.loss_curve import FIRST_CURVE_SCHEMA_ID, LossCurve
from megacpp_validate.evidence.receipt import Check, Part

# Recipe -> class of its quantizers, and the formats of inputs and weights, and of gradients.
CASTS: Final[dict[str, tuple[str, str, str]]] = {
    "delayed": ("Float8Quantizer", "e4m3", "e5m2"),
    "current": ("Float8CurrentScalingQuantizer", "e4m3", "e5m2"),
    "block": ("Float8BlockQuantizer", "e4m3", "e4m3"),
}
TENSORS: Final = frozenset({"input", "weight", "gradient"})
# A scale is one division in fp32, and so is its re-computation: two roundings of 2^-24, doubled.
SCALE_ERROR: Final = 2.0**-22


def check_observed(curve: LossCurve) -> Iterator[Check]:
    """Checks of what one FP8 run recorded of its layers; none of a file that is older than such records."""
    if curve.schema_id == FIRST_CURVE_SCHEMA_ID:
        return
    name = f"{curve.recipe}.seed{curve.seed}"
    wrong = [*_find_wrong_casts(curve)]
    part = Part("wrong casts", len(wrong), 0, not wrong, f"class and format of every cast as {curve.recipe} has them")
    yield Check(f"observed.casts.{name}", not wrong, (part,), "; ".join(wrong[:5]) or f"{len(curve.quantizers)} casts")
    if curve.recipe == "delayed":
        yield _check_histories(curve, name)


def _find_wrong_casts(curve: LossCurve) -> Iterator[str]:
    if not curve.quantizers:
        yield "no layer was seen to cast: FP8 never ran"
        return
    seen: dict[str, set[str]] = {}
    for row in curve.quantizers:
        seen.setdefault(row.layer, set()).add(row.tensor)
    for layer, tensors in seen.items():
        if lacking := sorted(TENSORS - tensors):
            yield f"{layer} casts no {', '.join(lacking)}"
    if curve.recipe not in CASTS:
        return
    kind, forward, backward = CASTS[curve.recipe]
    for row in curve.quantizers:
        wanted = backward if row.tensor == "gradient" else forward
        if (row.kind, row.format) != (kind, wanted):
            yield f"{row.layer}: {row.tensor} is cast by {row.kind} to {row.format}, wanted {kind} to {wanted}"


def _check_histories(curve: LossCurve, name: str) -> Check:
    rows = curve.histories
    still = sum(row.not_rolled for row in rows)
    empty = sum(row.not_collected for row in rows)
    worst = max((row.scale_error for row in rows), default=0.0)
    parts = (
        Part("steps looked at", len(rows), 1, bool(rows), "histories were looked at in some step", at_least=True),
        Part("histories that stood still", still, 0, not still, "every history moves on by one row a step"),
        Part("histories without an amax", empty, 0, not empty, "every cast leaves its amax"),
        Part("scale", worst, SCALE_ERROR, worst <= SCALE_ERROR, "against largest / max(history), two fp32 divisions"),
    )
    said = "; ".join(f"step {row.step}: {row.tensors} tensors" for row in rows)
    return Check(f"observed.histories.{name}", all(part.passed for part in parts), parts, said)
