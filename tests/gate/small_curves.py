"""Made-up curves whose arithmetic is exact: every number is a multiple of 2^-20, and windows are of 10 steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megacpp_validate.evidence.loss_curve import HistorySeen, LossCurve, QuantizerSeen
from megacpp_validate.gate.loss_casts import CASTS

DATA = "a" * 64
STEPS = 100
UNIT = 2.0**-20
PARTS = ("letters", *(f"layers.{place}" for place in range(5)), "norm", "head", "quiet", "lane")
LAYERS = ("hybrid.layers.1.mixer", "hybrid.layers.2.up", "hybrid.layers.2.down", "hybrid.layers.3.qkv", "lane.neck")
MADE_WITH = {"gpu": "made up", "torch": "9.9", "transformer_engine": "9.9"}
COLUMNS = {"input": 1, "weight": 1, "gradient": 2}  # of `CASTS`


def make_curve(recipe: str, seed: int, losses: Sequence[float], norms: Sequence[float]) -> LossCurve:
    """A whole run, whose layers held what those of the recipe do."""
    steps = tuple(range(len(losses)))
    parts = dict.fromkeys(PARTS, (1.0,) * len(losses))
    curve = LossCurve(
        recipe, seed, DATA, len(losses), steps, tuple(losses), tuple(norms), part_norms=parts, made_with=MADE_WITH
    )
    return as_recipe(curve, recipe)


def as_recipe(curve: LossCurve, recipe: str) -> LossCurve:
    """The curve as a run of another recipe would have left it: a little beside, as no two recipes take the same way."""
    beside = [*CASTS].index(recipe) * UNIT if recipe in CASTS else 0.0
    quantizers = make_casts(recipe) if recipe in CASTS else ()
    rows = tuple(HistorySeen(step, len(quantizers), 0, 0, 2.0**-24) for step in (2, 25, 75))
    losses = tuple(loss + beside for loss in curve.losses)
    histories = rows if recipe == "delayed" else ()
    return replace(curve, recipe=recipe, losses=losses, quantizers=quantizers, histories=histories)


def make_casts(recipe: str) -> tuple[QuantizerSeen, ...]:
    """Every cast of every layer in low precision, as the recipe has them."""
    return tuple(
        QuantizerSeen(layer, tensor, CASTS[recipe][0], CASTS[recipe][column])
        for layer in LAYERS
        for tensor, column in COLUMNS.items()
    )


def make_reference(seed: int) -> LossCurve:
    """A loss that falls from 3 to 2, and ends 2^-8 apart from seed to seed."""
    losses = [2 + (STEPS - step) / 128 + seed / 256 for step in range(STEPS)]
    return make_curve("bf16", seed, losses, [1.0 + (step * 37 % 11) / 64 for step in range(STEPS)])


def make_candidate(seed: int, gaps: Sequence[float], scale: float = 1.0) -> LossCurve:
    """The FP8 twin of `make_reference`: `gaps` above its losses, gradient norms `scale` times its norms."""
    reference = make_reference(seed)
    losses = [loss + gap for loss, gap in zip(reference.losses, gaps, strict=True)]
    return make_curve("delayed", seed, losses, [norm * scale for norm in reference.gradient_norms])


def make_pairs() -> tuple[list[LossCurve], list[LossCurve]]:
    """Three seeds, with a gap of 2^-10 to and fro."""
    gaps = [(-1) ** step * 2.0**-10 for step in range(STEPS)]
    return [make_reference(seed) for seed in range(3)], [make_candidate(seed, gaps) for seed in range(3)]
