"""What the loss gate holds to for all curves. Curves with one fault each are scenarios of `tests.replay`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.bridge.backends import Choice
from megacpp_validate.evidence.loss_curve import LossCurve, parse_curve
from megacpp_validate.gate.loss import LossOutcome, LossVerdict, decide_loss
from megacpp_validate.gate.loss_casts import check_casts
from megacpp_validate.report.curves import draw_loss_curves
from megacpp_validate.training.quantizers import see_experts
from tests.replay.loss import made_up

STEPS = 100
UNIT = 2.0**-20  # so that sums are exact
STUDENT = 4.303  # t at 95% of three seeds


def make_curve(recipe: str, seed: int, losses: Sequence[float], norms: Sequence[float]) -> LossCurve:
    curve = parse_curve(json.dumps(made_up(recipe, seed)))
    return replace(curve, losses=tuple(losses), gradient_norms=tuple(norms))


REFERENCE = [parse_curve(json.dumps(made_up("bf16", seed))) for seed in range(3)]


def make_candidate(seed: int, gaps: Sequence[float]) -> LossCurve:
    """FP8 beside the BF16 run of the same seed."""
    bf16 = REFERENCE[seed]
    return make_curve("delayed", seed, [*map(sum, zip(bf16.losses, gaps, strict=True))], bf16.gradient_norms)


@pytest.mark.parametrize(("gap", "fails"), [(0.99, False), (1.01, True)])
def test_the_gap_while_learning_is_held_to_what_seeds_do_there(gap: float, fails: bool) -> None:
    """Seeds 1/2048 apart in the first half and a quarter of that in the second: each half has a bar of its own."""
    first, reference, candidate = REFERENCE[0], [], []
    for seed in range(3):
        losses = [loss + seed / (2048 if step < 50 else 8192) for step, loss in enumerate(first.losses)]
        size = gap * STUDENT * math.sqrt(2) / 2048
        gaps = [size if 10 <= step < 20 else UNIT for step in range(STEPS)]
        reference.append(make_curve("bf16", seed, losses, first.gradient_norms))
        candidate.append(make_curve("delayed", seed, [*map(sum, zip(losses, gaps, strict=True))], first.gradient_norms))
    verdict = decide_loss(reference, candidate)
    assert verdict.bar == pytest.approx(STUDENT * math.sqrt(2) / 8192)
    red = {check.name.partition(".seed")[0] for check in verdict.checks if not check.passed}
    assert red == ({"gap.learning", "gap.short.learning"} if fails else set())


@pytest.mark.parametrize(("layers", "red"), [("2", []), ("", ["casts"]), ("02", ["layers"])])
def test_deep_gemm_casts_in_experts_alone(layers: str, red: list[str]) -> None:
    casts = see_experts({f"layers.{layer}.experts": Choice("experts", "deep_gemm", "deep_gemm") for layer in layers})
    curve = replace(make_candidate(0, [UNIT] * STEPS), recipe="deep_gemm", quantizers=casts)
    seen = [check.name for check in check_casts(curve, [curve]) if not check.passed]
    assert seen == [f"observed.{what}.deep_gemm.seed0" for what in red]


# A gap as a few levels that hold for a while each, so that windows, halves and tails all see something.
levels = st.lists(st.integers(-20_000, 20_000), min_size=1, max_size=10)
gaps = levels.map(lambda some: [some[step * len(some) // STEPS] * UNIT for step in range(STEPS)])
three_gaps = st.tuples(gaps, gaps, gaps)
powers = st.integers(0, 8).map(lambda power: 2.0**power)  # exact, so that no rounding stands between two verdicts
numbers = st.floats(allow_nan=True, allow_infinity=True)


def decide_three(three: tuple[list[float], ...], times: float = 1.0) -> LossVerdict:
    curves = [make_candidate(seed, [times * gap for gap in each]) for seed, each in enumerate(three)]
    return decide_loss(REFERENCE, curves)


@given(three=three_gaps, times=powers)
@settings(max_examples=150)
def test_gaps_that_are_scaled_up_never_turn_red_to_green(three: tuple[list[float], ...], times: float) -> None:
    if decide_three(three).outcome is LossOutcome.FAIL:
        assert decide_three(three, times).outcome is LossOutcome.FAIL


@given(
    losses=st.lists(numbers, min_size=6, max_size=6),
    norms=st.lists(numbers, min_size=6, max_size=6),
    planned=st.integers(-1, 130),
    steps=st.lists(st.integers(-2, 130), max_size=4),
    recipe=st.text(max_size=4),
)
@settings(max_examples=150)
def test_there_is_always_a_verdict_and_a_picture_of_it(
    losses: list[float], norms: list[float], planned: int, steps: list[int], recipe: str
) -> None:
    """Whole curves of any numbers, the largest ones included, and curves with some steps; nothing raises."""
    sides = []
    for side, name in enumerate(("bf16", "delayed")):
        own = [norms[3 * side + (step // 40) % 3] for step in range(STEPS)]
        rows = [[losses[3 * side + (step * (seed + 1) // 40) % 3] for step in range(STEPS)] for seed in range(3)]
        sides.append([make_curve(name, seed, row, own) for seed, row in enumerate(rows)])
    assert_not_green_unless_finite(decide_loss(*sides), [*losses, *norms])
    sides[1][0] = replace(sides[1][0], planned=planned, steps=tuple(steps), recipe=recipe)
    assert_not_green_unless_finite(decide_loss(*sides), [math.nan])


def assert_not_green_unless_finite(verdict: LossVerdict, values: list[float]) -> None:
    assert verdict.outcome in LossOutcome
    assert draw_loss_curves(verdict).svg.startswith("<svg")
    if verdict.outcome is LossOutcome.PASS:
        assert all(check.passed for check in verdict.checks)
        assert all(map(math.isfinite, values))
