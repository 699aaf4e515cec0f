"""What holds for all curves: there is always a verdict, and a gap that grows never turns it from red to green."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.gate.loss import decide_loss
from megacpp_validate.gate.loss_result import LossOutcome, LossVerdict
from megacpp_validate.report.drawings.loss_curves import draw_loss_curves
from tests.gate.small_curves import STEPS, UNIT, make_candidate, make_curve, make_reference

REFERENCE = [make_reference(seed) for seed in range(3)]

# A gap as a few levels that hold for a while each, so that windows, halves and tails all see something.
levels = st.lists(st.integers(-20_000, 20_000), min_size=1, max_size=10)
gaps = levels.map(lambda some: [some[step * len(some) // STEPS] * UNIT for step in range(STEPS)])
three_gaps = st.tuples(gaps, gaps, gaps)
powers = st.integers(0, 8).map(lambda power: 2.0**power)  # exact, so that no rounding stands between two verdicts
numbers = st.floats(allow_nan=True, allow_infinity=True)


def decide(three: tuple[list[float], ...], times: float = 1.0) -> LossVerdict:
    curves = [make_candidate(seed, [times * gap for gap in each]) for seed, each in enumerate(three)]
    return decide_loss(REFERENCE, curves)


@given(three=three_gaps, times=powers)
@settings(max_examples=150)
def test_gaps_that_are_scaled_up_never_turn_red_to_green(three: tuple[list[float], ...], times: float) -> None:
    if decide(three).outcome is LossOutcome.FAIL:
        assert decide(three, times).outcome is LossOutcome.FAIL


@given(three=three_gaps, rises=gaps)
@settings(max_examples=100)
def test_a_loss_that_rises_never_turns_a_gap_above_to_green(three: tuple[list[float], ...], rises: list[float]) -> None:
    """Where all gaps are above zero, a step whose gap grows by any amount leaves each check as bad or worse."""
    above = tuple([abs(gap) for gap in each] for each in three)
    higher = tuple([gap + abs(rise) for gap, rise in zip(each, rises, strict=True)] for each in above)
    if decide(above).outcome is LossOutcome.FAIL:
        assert decide(higher).outcome is LossOutcome.FAIL


@given(first=st.floats(-0.2, 0.2), times=st.floats(1.0, 50.0))
@settings(max_examples=100)
def test_gradients_that_are_scaled_further_stay_red(first: float, times: float) -> None:
    def norms_times(logarithm: float) -> LossOutcome:
        curves = [make_candidate(seed, [UNIT] * STEPS, math.exp(logarithm)) for seed in range(3)]
        return decide_loss(REFERENCE, curves).outcome

    if norms_times(first) is LossOutcome.FAIL:
        assert norms_times(first * times * (1 + 1e-9)) is LossOutcome.FAIL


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
        curves = [
            make_curve(
                name,
                seed,
                [losses[3 * side + (step * (seed + 1) // 40) % 3] for step in range(STEPS)],
                [norms[3 * side + (step // 40) % 3] for step in range(STEPS)],
            )
            for seed in range(3)
        ]
        sides.append(curves)
    assert_not_green_unless_finite(decide_loss(*sides), [*losses, *norms])
    sides[1][0] = replace(sides[1][0], planned=planned, steps=tuple(steps), recipe=recipe)
    assert_not_green_unless_finite(decide_loss(*sides), [math.nan])


def assert_not_green_unless_finite(verdict: LossVerdict, values: list[float]) -> None:
    assert verdict.outcome in LossOutcome
    assert draw_loss_curves(verdict).startswith("<svg")
    if verdict.outcome is LossOutcome.PASS:
        assert all(check.passed for check in verdict.checks)
        assert all(map(math.isfinite, values))
