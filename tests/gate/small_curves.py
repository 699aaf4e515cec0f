"""Made-up curves whose arithmetic is exact: every number is a multiple of 2^-20, and windows are of 10 steps."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_validate.evidence.loss_curve import FIRST_CURVE_SCHEMA_ID, LossCurve

DATA = "a" * 64
STEPS = 100
UNIT = 2.0**-20


def make_curve(recipe: str, seed: int, losses: Sequence[float], norms: Sequence[float]) -> LossCurve:
    steps = tuple(range(len(losses)))
    return LossCurve(
        recipe, seed, DATA, len(losses), steps, tuple(losses), tuple(norms), schema_id=FIRST_CURVE_SCHEMA_ID
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
