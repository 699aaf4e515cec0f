"""What the layers held while they trained: the casts of each recipe, which layers made them, and how delayed scaling
moved.

These checks stand beside those of the curves, and take nothing from them: a cast that is right and a loss that is off
fails, and so does a loss that follows while the wrong format ran, or ran in too few layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..evidence.loss_curve import LossCurve
from ..evidence.receipt import Check, Part

# Recipe -> class of its quantizers, and the formats of inputs and weights, and of gradients. NVFP4's is as Transformer
# Engine calls its dtype.
CASTS: Final[dict[str, tuple[str, str, str]]] = {
    "delayed": ("Float8Quantizer", "e4m3", "e5m2"),
    "current": ("Float8CurrentScalingQuantizer", "e4m3", "e5m2"),
    "block": ("Float8BlockQuantizer", "e4m3", "e4m3"),
    "mxfp8": ("MXFP8Quantizer", "e4m3", "e4m3"),
    "nvfp4": ("NVFP4Quantizer", "kfloat4e2m1", "kfloat4e2m1"),
}
TENSORS: Final = frozenset({"input", "weight", "gradient"})
LANE: Final = "lane"  # the part of the gate's model in front of its layers in low precision
# A scale is one division in fp32, and so is its re-computation: two roundings of 2^-24, doubled.
SCALE_ERROR: Final = 2.0**-22


@dataclass(frozen=True)
class Held:
    """What runs of one model held together: what each of them should have held.

    Attributes:
        casts: layer and tensor of everything that one of them cast.
        histories: the most that were looked at in one step.
    """

    casts: frozenset[tuple[str, str]]
    histories: int


def hold(curves: Sequence[LossCurve]) -> Held:
    """What these runs held together; they are of one model, with any seeds and FP8 recipes."""
    casts = frozenset((row.layer, row.tensor) for curve in curves for row in curve.quantizers)
    return Held(casts, max((row.tensors for curve in curves for row in curve.histories), default=0))


def check_observed(curve: LossCurve, held: Held) -> Iterator[Check]:
    """Checks of what one FP8 run recorded of its layers.

    Args:
        held: what it and its fellows held together.
    """
    for what, wrong, derivation in (
        ("casts", list(_find_wrong_casts(curve)), f"class and format of every cast as {curve.recipe} has them"),
        ("layers", list(_find_wrong_layers(curve, held)), "every layer outside of the BF16 zones casts, none inside"),
    ):
        part = Part(f"wrong {what}", len(wrong), 0, not wrong, derivation)
        detail = "; ".join(wrong[:5]) or f"{len(curve.quantizers)} casts"
        yield Check(f"observed.{what}.{curve.recipe}.seed{curve.seed}", not wrong, (part,), detail)
    if curve.recipe == "delayed":
        yield _check_histories(curve, max(held.histories, len(curve.quantizers)))


def _find_wrong_casts(curve: LossCurve) -> Iterator[str]:
    if not curve.quantizers:
        yield "no layer was seen to cast: FP8 never ran"
    seen: dict[str, set[str]] = {}
    for row in curve.quantizers:
        seen.setdefault(row.layer, set()).add(row.tensor)
    for layer, tensors in seen.items():
        if lacking := sorted(TENSORS - tensors):
            yield f"{layer} casts no {', '.join(lacking)}"
    kind, forward, backward = CASTS[curve.recipe]  # another recipe is refused
    for row in curve.quantizers:
        wanted = backward if row.tensor == "gradient" else forward
        if (row.kind, row.format) != (kind, wanted):
            yield f"{row.layer}: {row.tensor} is cast by {row.kind} to {row.format}, not by {kind} to {wanted}"


def _find_wrong_layers(curve: LossCurve, held: Held) -> Iterator[str]:
    own, low = hold([curve]).casts, _list_low_parts(curve)
    # What another run casts inside of the zones is that run's fault: it is looked at there.
    for layer, tensor in sorted(cast for cast in held.casts - own if not low or _part_of(cast[0]) in low):
        yield f"{layer} does not cast its {tensor}, and does with another seed or recipe"
    if not low:
        yield "the parts of the model are not on record, so that the layers that must cast are unknown"
        return
    for part in sorted(low - {_part_of(layer) for layer, _ in own}):
        yield f"no layer of {part} casts, which is outside of the BF16 zones"
    for layer in sorted({layer for layer, _ in own if _part_of(layer) not in low}):
        yield f"{layer} casts, which is to stay in BF16"


def _list_low_parts(curve: LossCurve) -> frozenset[str]:
    """Parts of the gate's model that run in low precision: its lane, and its layers but the first and the last one.

    Empty where the run did not record enough parts to tell.
    """
    numbers = sorted(int(part[7:]) for part in curve.part_norms if part.startswith("layers.") and part[7:].isdecimal())
    whole = numbers == list(range(len(numbers))) and len(numbers) > 2 and LANE in curve.part_norms
    return frozenset({LANE, *(f"layers.{number}" for number in numbers[1:-1])}) if whole else frozenset()


def _part_of(layer: str) -> str:
    """The part of the model that a layer belongs to, by its name: "hybrid.layers.2.up" -> "layers.2"."""
    first, *rest = layer.removeprefix("hybrid.").split(".")
    return f"{first}.{rest[0]}" if first == "layers" and rest else first


def _check_histories(curve: LossCurve, wanted: int) -> Check:
    rows, planned = curve.histories, range(curve.planned)
    numbers = [(row.tensors, row.not_rolled, row.not_collected, row.scale_error) for row in rows]
    false = sum(row.step not in planned or min(seen) < 0 for row, seen in zip(rows, numbers, strict=True))
    settled = sum(curve.planned // 2 <= row.step < curve.planned for row in rows)
    worst = max((abs(row.scale_error) for row in rows), default=0.0)
    fewest = min((row.tensors for row in rows), default=0)
    ceilings = (
        ("steps that cannot be", false, 0, "a step of the run, and no count or error below 0"),
        ("histories that stood still", sum(row.not_rolled for row in rows), 0, "every history rolls once a step"),
        ("histories without an amax", sum(row.not_collected for row in rows), 0, "every cast leaves its amax"),
        ("scale", worst, SCALE_ERROR, "against largest / max(history), two fp32 divisions"),
    )
    floors = (
        ("steps looked at", len(rows), 1, "histories were looked at in some step"),
        ("of the second half", settled, 1, "what rolled once may stand still later"),
        ("histories", fewest, wanted, "a history for each cast, and as many in each step and seed"),
    )
    parts = tuple(Part(name, seen, bound, seen >= bound, why, at_least=True) for name, seen, bound, why in floors)
    parts += tuple(Part(name, seen, bound, seen <= bound, why) for name, seen, bound, why in ceilings)
    detail = "; ".join(f"step {row.step}: {row.tensors} tensors" for row in rows)
    name = f"observed.histories.{curve.recipe}.seed{curve.seed}"
    return Check(name, all(part.passed for part in parts), parts, detail)
