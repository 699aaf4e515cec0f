"""The checks of the loss gate on what the layers of an FP8 run held: casts, the layers that made them, delayed scaling.

They take nothing from the curves: a right cast does not excuse a loss that is off, nor a good loss a wrong format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ..evidence.loss_curve import LossCurve
from ..evidence.receipt import Check, Part

# Recipe -> class of its quantizers, and the formats of inputs and weights, and of gradients. NVFP4's is as Transformer
# Engine calls its dtype. "deep_gemm" is DeepGEMM in the experts alone: every other layer is in BF16.
CASTS: Final[dict[str, tuple[str, str, str]]] = {
    "delayed": ("Float8Quantizer", "e4m3", "e5m2"),
    "current": ("Float8CurrentScalingQuantizer", "e4m3", "e5m2"),
    "block": ("Float8BlockQuantizer", "e4m3", "e4m3"),
    "mxfp8": ("MXFP8Quantizer", "e4m3", "e4m3"),
    "nvfp4": ("NVFP4Quantizer", "kfloat4e2m1", "kfloat4e2m1"),
    "deep_gemm": ("deep_gemm", "e4m3", "e4m3"),
}
TENSORS: Final = frozenset({"input", "weight", "gradient"})
LANE: Final = "lane"  # the part of the gate's model in front of its layers in low precision
# A scale is one division in fp32, and so is its re-computation: two roundings of 2^-24, doubled.
SCALE_ERROR: Final = 2.0**-22


def check_casts(curve: LossCurve, fellows: Sequence[LossCurve]) -> Iterator[Check]:
    """Checks of what one FP8 run recorded of its layers.

    Args:
        fellows: runs of the same model, this one among them, with any seeds and FP8 recipes: layers that cast in one
            of them must cast in this one.
    """
    name = f"{curve.recipe}.seed{curve.seed}"
    for what, wrong, derivation in (
        ("casts", list(_find_wrong_casts(curve)), f"class and format of every cast as {curve.recipe} has them"),
        ("layers", list(_find_wrong_layers(curve, fellows)), "every layer outside of the BF16 zones casts"),
    ):
        part = Part(f"wrong {what}", len(wrong), 0, not wrong, derivation)
        detail = "; ".join(wrong[:5]) or f"{len(curve.quantizers)} casts"
        yield Check(f"observed.{what}.{name}", not wrong, (part,), detail)
    if curve.recipe == "delayed":
        parts = tuple(_check_histories(curve))
        detail = "; ".join(f"step {row.step}: {row.tensors} tensors" for row in curve.histories)
        yield Check(f"observed.histories.{name}", all(part.passed for part in parts), parts, detail)


def _find_wrong_casts(curve: LossCurve) -> Iterator[str]:
    if not curve.quantizers:
        yield "no layer was seen to cast: FP8 never ran"
    kind, forward, backward = CASTS[curve.recipe]  # another recipe is refused
    tensors: dict[str, set[str]] = {}
    for row in curve.quantizers:
        tensors.setdefault(row.layer, set()).add(row.tensor)
        wanted = backward if row.tensor == "gradient" else forward
        if (row.kind, row.format) != (kind, wanted):
            yield f"{row.layer}: {row.tensor} is cast by {row.kind} to {row.format}, not by {kind} to {wanted}"
    for layer, own in tensors.items():
        if lacking := sorted(TENSORS - own):
            yield f"{layer} casts no {', '.join(lacking)}"


def _find_wrong_layers(curve: LossCurve, fellows: Sequence[LossCurve]) -> Iterator[str]:
    own, low = {row.layer for row in curve.quantizers}, _list_low_parts(curve)
    if not low:
        yield "the parts of the model are not on record, so that the layers that must cast are unknown"
        return
    # What another run casts inside of the zones is that run's fault: it is looked at there.
    others = {row.layer for fellow in fellows for row in fellow.quantizers if _part_of(row.layer) in low}
    for layer in sorted(others - own):
        yield f"{layer} does not cast, and does with another seed or recipe"
    cast = low if curve.recipe == "deep_gemm" else {_part_of(layer) for layer in own}
    for part in sorted(low - cast):
        yield f"no layer of {part} casts, which is outside of the BF16 zones"
    for layer in sorted(layer for layer in own if _part_of(layer) not in low):
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


def _check_histories(curve: LossCurve) -> Iterator[Part]:
    rows, casts = curve.histories, len(curve.quantizers)
    settled = sum(row.step >= curve.planned // 2 for row in rows)
    fewest = min((row.tensors for row in rows), default=0)
    yield Part("of the second half", settled, 1, settled >= 1, "what rolled once may stand still later", at_least=True)
    yield Part("histories", fewest, casts, fewest >= casts, "one a cast, in each step", at_least=True)
    still, empty = sum(row.not_rolled for row in rows), sum(row.not_collected for row in rows)
    scale = max((abs(row.scale_error) for row in rows), default=0.0)
    for name, number, ceiling, why in (
        ("histories that stood still", still, 0, "every history rolls once a step"),
        ("histories without an amax", empty, 0, "every cast leaves its amax"),
        ("scale", scale, SCALE_ERROR, "against largest / max(history), two fp32 divisions"),
    ):
        yield Part(name, number, ceiling, number <= ceiling, why)
