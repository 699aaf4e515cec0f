"""The loss gate: each check just within and beyond its bound, and what holds for all curves.

Curves with one fault each, made up and of an H200, are scenarios of `tests.replay`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.gate.loss import CAP, LossOutcome, LossVerdict, decide_loss, spread_of_seeds, t_of
from megacpp_validate.report.curves import draw_loss_curves
from tests.gate.small_curves import STEPS, UNIT, as_recipe, make_candidate, make_curve, make_pairs, make_reference

REFERENCE = [make_reference(seed) for seed in range(3)]
HALF, TAIL = STEPS // 2, STEPS - STEPS // 5


def decide(gaps: list[float], scale: float = 1.0, others: float = UNIT) -> LossVerdict:
    """Seed 1 with these gaps; the other seeds with the gap `others` at each step."""
    rest = [make_candidate(seed, [others] * STEPS, scale) for seed in (0, 2)]
    return decide_loss(REFERENCE, [*rest, make_candidate(1, gaps, scale)])


def failed(verdict: LossVerdict) -> list[str]:
    return [check.name for check in verdict.checks if not check.passed]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("steps", "cap", "name"),
    [
        (range(HALF + 10, HALF + 20), CAP, "gap.settled.seed1"),  # one window, before the tail
        (range(TAIL, STEPS), CAP / math.sqrt(3), "gap.tail"),
        # The cap holds while learning too: the reference's seeds are 1/256 apart, which would make a bar of 0.024.
        (range(10, 20), CAP, "gap.learning.seed1"),
    ],
)
def test_a_gap_just_within_and_just_beyond_its_cap(sign: int, steps: range, cap: float, name: str) -> None:
    for times, fails in ((0.99, []), (1.01, [name])):
        gaps = [sign * times * cap if step in steps else UNIT for step in range(STEPS)]
        verdict = decide(gaps, others=sign * times * cap if name == "gap.tail" else UNIT)
        assert (failed(verdict), verdict.bar) == (fails, CAP)


@pytest.mark.parametrize(("gap", "fails"), [(0.99, False), (1.01, True)])
def test_the_gap_while_learning_is_held_to_what_seeds_do_there(gap: float, fails: bool) -> None:
    """Seeds 1/2048 apart in the first half and a quarter of that in the second: each half has a bar of its own."""
    apart = [1 / 2048 if step < HALF else 1 / 8192 for step in range(STEPS)]
    reference = [
        replace(REFERENCE[0], seed=seed, losses=tuple(map(lambda a, b: a + seed * b, REFERENCE[0].losses, apart)))
        for seed in range(3)
    ]
    size = gap * t_of(3)[0] * math.sqrt(2) / 2048
    gaps = [size if 10 <= step < 20 else UNIT for step in range(STEPS)]
    candidate = [
        as_recipe(replace(curve, losses=tuple(map(lambda a, b: a + b, curve.losses, gaps))), "delayed")
        for curve in reference
    ]
    verdict = decide_loss(reference, candidate)
    assert verdict.bar == pytest.approx(t_of(3)[0] * math.sqrt(2) / 8192)
    assert {name.partition(".seed")[0] for name in failed(verdict)} == (
        {"gap.learning", "gap.short.learning"} if fails else set()
    )


@pytest.mark.parametrize("scale", [1.03, 1 / 1.03, 0.0, 1e308, 1.01, 1 / 1.01])
def test_scaled_gradients_fail_where_the_loss_hides_them(scale: float) -> None:
    fails = failed(decide([UNIT] * STEPS, scale))
    assert ("gradient_norm.matched" in fails) is (abs(math.log(max(scale, 1e-9))) > 0.02)
    assert not any(name.startswith("gap") for name in fails)


@pytest.mark.parametrize(
    ("scale", "fails"),
    [
        (1.05, []),
        (1.07, ["gradient_norm.short", "gradient_norm.later"]),
        (0.0, ["gradient_norm.noise.settled", "gradient_norm.short", "gradient_norm.later"]),
    ],
)
def test_gradients_that_change_late_fail(scale: float, fails: list[str]) -> None:
    bf16, fp8 = make_pairs()
    norms = [[norm * (scale if step >= 90 else 1) for step, norm in enumerate(one.gradient_norms)] for one in fp8]
    late = [replace(one, gradient_norms=tuple(row)) for one, row in zip(fp8, norms, strict=True)]
    assert failed(decide_loss(bf16, late)) == fails


def test_a_layer_that_casts_with_other_seeds_must_cast() -> None:
    bf16, fp8 = make_pairs()
    casts = tuple(row for row in fp8[0].quantizers if row.layer != "hybrid.layers.2.up")
    verdict = decide_loss(bf16, [replace(fp8[0], quantizers=casts, histories=()), *fp8[1:]])
    assert "observed.layers.delayed.seed0" in failed(verdict)


def pick(*places: int) -> Callable[[LossCurve], LossCurve]:
    """A record of these steps, in this order, of a run that was planned for all of them."""

    def change(curve: LossCurve) -> LossCurve:
        steps, losses, norms = (
            tuple(row[place] for place in places) for row in (curve.steps, curve.losses, curve.gradient_norms)
        )
        parts = {part: tuple(row[place] for place in places) for part, row in curve.part_norms.items()}
        return replace(curve, steps=steps, losses=losses, gradient_norms=norms, part_norms=parts)  # type: ignore[arg-type]

    return change


def put(name: str, value: float) -> Callable[[LossCurve], LossCurve]:
    """The value of step 50 of a series changed."""
    return lambda curve: replace(curve, **{name: (*getattr(curve, name)[:50], value, *getattr(curve, name)[51:])})


@pytest.mark.parametrize(
    "damage",
    [
        put("losses", math.nan), put("losses", math.inf), put("losses", -1.0), put("gradient_norms", math.nan),
        put("steps", 49), put("steps", 100), pick(*range(99)), pick(*range(1, STEPS)), pick(),
        pick(*range(51), *range(50, STEPS)), pick(*range(50), *range(51, STEPS)), pick(*reversed(range(STEPS))),
        lambda curve: replace(curve, part_norms=curve.part_norms | {"head": (math.nan,) * STEPS}),
    ],
)  # fmt: skip
def test_a_step_that_is_missing_doubled_or_not_finite_is_never_judged_good(
    damage: Callable[[LossCurve], LossCurve],
) -> None:
    """In an FP8 run it is a failure, in BF16 nothing can be compared with it."""
    bf16, fp8 = make_pairs()
    assert decide_loss(bf16, fp8).outcome is LossOutcome.PASS
    verdict = decide_loss(bf16, [fp8[0], damage(fp8[1]), fp8[2]])
    assert (verdict.outcome, failed(verdict)) == (LossOutcome.FAIL, ["steps.delayed.seed1"])
    assert decide_loss([bf16[0], damage(bf16[1]), bf16[2]], fp8).outcome is LossOutcome.REFUSED


def test_sums_that_overflow_are_red() -> None:
    """Finite losses whose sums are not: Inf minus Inf is NaN, and a NaN is within no bound."""
    candidate = [
        make_candidate(seed, [(1 + step % 2) * (7 + seed / 8) * 1e307 for step in range(STEPS)]) for seed in range(3)
    ]
    verdict = decide_loss(REFERENCE, candidate)
    assert verdict.outcome is LossOutcome.FAIL
    assert "gap.tail" in failed(verdict)
    assert verdict.series == ()
    assert LossVerdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_the_spread_is_the_largest_of_all_windows() -> None:
    apart = [[0.0, 0.0, 9.0, 9.0], [2.0, 2.0, 9.0, 9.0]]
    assert spread_of_seeds(apart) == pytest.approx(math.sqrt(2))
    assert [t_of(seeds)[0] for seeds in (3, 10, 12, 99)] == [4.303, 2.262, 2.262, 2.131]


def test_the_farthest_of_many_seeds_is_as_seldom_beyond_as_that_of_three() -> None:
    """Quantiles of Student's t at 1 - 0.075 / seeds, by the tables of 26.7 in Abramowitz and Stegun."""
    assert [t_of(seeds)[1] for seeds in (3, 4, 5, 16, 64)] == [4.303, 3.572, 3.298, 2.978, 2.978]
    assert all(t_of(seeds)[0] < t_of(seeds)[1] < 4.303 for seeds in range(4, 200))


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
