"""Which curves are refused, and which damage fails: small made-up curves, one fault each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.gate.loss import decide_loss
from megacpp_validate.gate.loss_result import LossOutcome
from megacpp_validate.report.describe.loss import describe_verdict
from tests.gate.small_curves import DATA, cut_to, make_pairs

Curves = list[LossCurve]


def test_the_small_curves_pass_as_they_are() -> None:
    assert decide_loss(*make_pairs()).outcome is LossOutcome.PASS


def swap(values: Sequence[float], first: int, second: int) -> tuple[float, ...]:
    changed = list(values)
    changed[first], changed[second] = changed[second], changed[first]
    return tuple(changed)


DAMAGE: dict[str, tuple[Callable[[LossCurve], LossCurve], str]] = {
    "a missing step": (
        lambda c: replace(
            c,
            steps=c.steps[:5] + c.steps[6:],
            losses=c.losses[:5] + c.losses[6:],
            gradient_norms=c.gradient_norms[:5] + c.gradient_norms[6:],
        ),
        "1 of 100 steps is missing, the first is step 5",
    ),
    "a repeated step": (
        lambda c: replace(
            c,
            steps=c.steps[:6] + c.steps[5:],
            losses=c.losses[:6] + c.losses[5:],
            gradient_norms=c.gradient_norms[:6] + c.gradient_norms[5:],
        ),
        "1 step is repeated, the first is step 5",
    ),
    "out of order": (lambda c: replace(c, steps=swap(c.steps, 0, 7)), "out of order"),
    "beyond the plan": (
        lambda c: replace(c, steps=(*c.steps[:-1], 100)),
        "1 step is none of the 100 planned, the first is step 100",
    ),
    "below zero": (lambda c: replace(c, steps=(-1, *c.steps[1:])), "the first is step -1"),
    "a loss that is NaN": (
        lambda c: replace(c, losses=(*c.losses[:40], math.nan, *c.losses[41:])),
        "the loss of 1 step is not finite, the first is step 40",
    ),
    "a loss below 0": (lambda c: replace(c, losses=(*c.losses[:40], -1.0, *c.losses[41:])), "a loss is below 0"),
    "a loss that is Inf": (lambda c: replace(c, losses=(math.inf, *c.losses[1:])), "the loss of 1 step is"),
    "a norm that is Inf": (
        lambda c: replace(c, gradient_norms=(*c.gradient_norms[:-1], math.inf)),
        "the gradient norm of 1 step is not finite, the first is step 99",
    ),
    "a norm below 0": (lambda c: replace(c, gradient_norms=(-1.0, *c.gradient_norms[1:])), "below 0"),
    "a part's loss that is NaN": (
        lambda c: replace(c, part_losses={"quiet": (*c.losses[:7], math.nan, *c.losses[8:])}),
        "the loss of quiet of 1 step is not finite, the first is step 7",
    ),
    "a part's norm too few": (
        lambda c: replace(c, part_norms={"lane": c.gradient_norms[:-1]}),
        "100 steps and 99 values of the gradient norm of lane",
    ),
    "a part's norm below 0": (
        lambda c: replace(c, part_norms={"lane": (-1.0, *c.gradient_norms[1:])}),
        "below 0",
    ),
    "a loss too few": (lambda c: replace(c, losses=c.losses[:-1]), "100 steps and 99 values of the loss"),
    "nothing": (
        lambda c: replace(c, steps=(), losses=(), gradient_norms=()),
        "100 of 100 steps are missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_fp8_fails(name: str) -> None:
    damage, said = DAMAGE[name]
    bf16, fp8 = make_pairs()
    fp8[1] = damage(fp8[1])
    verdict = decide_loss(bf16, fp8)
    assert verdict.outcome is LossOutcome.FAIL
    (check,) = [check for check in verdict.checks if not check.passed]
    assert check.name == "steps.delayed.seed1"
    assert said in check.detail


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_bf16_is_not_blamed_on_fp8(name: str) -> None:
    damage, said = DAMAGE[name]
    bf16, fp8 = make_pairs()
    bf16[1] = damage(bf16[1])
    verdict = decide_loss(bf16, fp8)
    assert verdict.outcome is LossOutcome.REFUSED
    (refusal,) = verdict.refusals
    assert refusal.startswith("the run of bf16 with seed 1 is damaged: ")
    assert said in refusal
    assert "does not follow" not in describe_verdict(verdict).message


def shorten(curve: LossCurve) -> LossCurve:
    return replace(cut_to(curve, 90), planned=90)


REFUSED: dict[str, tuple[Callable[[Curves, Curves], tuple[Curves, Curves]], str]] = {
    "another length": (lambda b, f: (b, [shorten(f[0]), *f[1:]]), "runs of 90 and 100 steps were planned"),
    "too short": (lambda b, f: ([*map(shorten, b)], [*map(shorten, f)]), "100 at least are needed"),
    "other data": (lambda b, f: (b, [replace(f[0], data="b" * 64), *f[1:]]), "seed 0 saw other data"),
    "a seed less": (lambda b, f: (b, f[1:]), "lacks seed 0 of the reference"),
    "a seed more": (lambda b, f: (b, [*f, replace(f[0], seed=9)]), "lacks seed 9 of the candidate"),
    "another seed": (lambda b, f: (b, [*f[:-1], replace(f[-1], seed=9)]), "lacks seed 2 of the reference"),
    "a seed twice": (lambda b, f: (b, [*f, f[0]]), "has seed 0 more than once"),
    "two seeds": (lambda b, f: (b[:2], f[:2]), "has 2 seeds, 3 at least"),
    "one seed": (lambda b, f: (b[:1], f[:1]), "has 1 seed, 3 at least"),
    "no seed": (lambda b, f: ([], []), "has 0 seeds"),
    "no candidate": (lambda b, f: (b, []), "the candidate lacks seed 0"),
    "mixed recipes": (lambda b, f: (b, [replace(f[0], recipe="block"), *f[1:]]), "mixes block, delayed"),
    "BF16 as FP8": (lambda b, f: (b, [replace(c, recipe="bf16") for c in f]), "curves of an FP8 recipe"),
    "FP8 as BF16": (lambda b, f: ([replace(c, recipe="delayed") for c in b], f), "give it curves of bf16 alone"),
    "FP8 never ran": (lambda b, f: (b, [replace(c, recipe="delayed") for c in b]), "FP8 never ran"),
    "FP8 ran in a part of the steps alone": (
        lambda b, f: (b, [replace(f[0], losses=b[0].losses[:20] + f[0].losses[20:]), *f[1:]]),
        "has the very same losses in delayed as in bf16, from step 0 to step 19",
    ),
    "a copy but for its last digits": (
        lambda b, f: (b, [f[0], replace(f[0], seed=1, losses=tuple(x + 1e-9 for x in f[0].losses)), f[2]]),
        "delayed with seed 0 and delayed with seed 1 have the very same losses, in every step",
    ),
    "nothing is learned": (
        lambda b, f: ([replace(c, losses=tuple(3 + x / 500 for x in c.losses)) for c in b], f),
        "the run of bf16 with seed 0 is no reference: its smoothed loss falls by",
    ),
    "BF16 diverged": (
        lambda b, f: ([*b[:2], replace(b[2], losses=b[2].losses[:60] + b[2].losses[40:80][::-1])], f),
        "seed 2 is no reference: its smoothed loss ends",
    ),
    "a recipe under another name": (
        lambda b, f: (b, [replace(c, losses=f[0].losses) for c in f]),
        "two seeds of delayed are the same curve",
    ),
    "a setting that one side tells": (
        lambda b, f: (b, [replace(c, made_with={**c.made_with, "learning_rate": "0.1"}) for c in f]),
        "the run of bf16 with seed 0 does not say its learning_rate",
    ),
    "seed not used": (
        lambda b, f: ([replace(c, losses=b[0].losses) for c in b], f),
        "two seeds of bf16 are the same curve",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused_with_a_next_step(name: str) -> None:
    change, said = REFUSED[name]
    verdict = decide_loss(*change(*make_pairs()))
    assert verdict.outcome is LossOutcome.REFUSED
    assert any(said in refusal for refusal in verdict.refusals), verdict.refusals
    assert all("next step: " in refusal for refusal in verdict.refusals)
    assert (verdict.checks, verdict.series) == ((), ())


def test_the_small_curves_name_one_data() -> None:
    assert {curve.data for curves in make_pairs() for curve in curves} == {DATA}


def test_a_recipe_that_is_another_one_s_curve_is_refused() -> None:
    bf16, fp8 = make_pairs()
    copies = [replace(curve, recipe="current") for curve in fp8]
    verdict = decide_loss(bf16, fp8, copies)
    assert verdict.outcome is LossOutcome.REFUSED
    assert "delayed with seed 0 and current with seed 0 have the very same losses" in verdict.refusals[0]
