"""Whether a run reproduces another: rounding passes, and what a plan can be wrong by does not."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import pytest

from megacpp_validate.evidence.loss_curve import UNIT_ROUNDOFF, Depth
from megacpp_validate.evidence.receipt import Check
from megacpp_validate.probes.smoke.reproduce import (
    MOST,
    MULTIPLE,
    Reference,
    check_follows,
    compare_trajectories,
    follows,
    reference_of,
)
from megacpp_validate.probes.smoke.runs import Trajectory
from tests.probes.smoke.test_train import failed, left_by, new_bench, run_of

STEPS = 10
DEPTH = Depth(layers=6, terms=64, tokens=256)
LOSSES = tuple(3.4 - 0.02 * step for step in range(STEPS))
NORMS = tuple(1.3 - 0.05 * step for step in range(STEPS))
REFERENCE = Trajectory(LOSSES, NORMS)


def shaken(seed: int) -> Trajectory:
    """The reference with a difference that doubles each step, of a size in roundings of fp64 that the seed draws."""
    drawn = random.Random(seed)

    def series(values: tuple[float | None, ...]) -> tuple[float, ...]:
        start = drawn.gauss(0, UNIT_ROUNDOFF["fp64"])
        return tuple((value or 0.0) * (1 + start * 2.0**step) for step, value in enumerate(values))

    return Trajectory(series(LOSSES), series(NORMS))


def beside(*twins: Trajectory, run: Trajectory = REFERENCE) -> Reference:
    return Reference(run, (run, *twins), "fp64", DEPTH)


SHAKEN = beside(*map(shaken, (1, 2, 3)))


def discriminates(check: Check) -> bool:
    return all(part.passed for part in check.parts if part.name.endswith("discriminates"))


def checks(plan: Trajectory, given: Reference = SHAKEN) -> dict[str, Check]:
    return compare_trajectories(plan, given)


@pytest.mark.parametrize("seed", range(10, 20))
def test_another_order_of_sums_follows(seed: int) -> None:
    found = checks(shaken(seed))
    assert all(follows(check) and discriminates(check) for check in found.values())


def norms_times(factor: float, start: int = 0) -> Trajectory:
    return replace(REFERENCE, grad_norms=tuple(n * (factor if step >= start else 1) for step, n in enumerate(NORMS)))


def losses_moved(by: float, start: int = 0) -> Trajectory:
    return replace(REFERENCE, losses=tuple(one + (by if step >= start else 0) for step, one in enumerate(LOSSES)))


# One norm of 40 parameters of like size, half of whose gradient is missing; and less than that.
MISSING_NORM = math.sqrt(1 - 0.75 / 40)
PLANTED: dict[str, tuple[Trajectory, set[str]]] = {
    "one-norm-gradient-not-summed": (norms_times(MISSING_NORM), {"grad_norm"}),
    "a-share-that-is-half": (losses_moved(-1.7), {"loss"}),
    "wrong-from-the-fifth-step-on": (losses_moved(1e-6, start=5), {"loss"}),
    "a-last-step-alone": (norms_times(1 + 1e-8, start=STEPS - 1), {"grad_norm"}),
}


@pytest.mark.parametrize(("plan", "wrong"), PLANTED.values(), ids=PLANTED)
def test_what_a_plan_can_be_wrong_by_does_not_follow(plan: Trajectory, wrong: set[str]) -> None:
    found = checks(plan)
    assert {name for name, check in found.items() if not follows(check)} == wrong
    assert all(discriminates(check) for check in found.values())


DAMAGED = {
    "not-finite": (replace(REFERENCE, losses=(*LOSSES[:-1], math.nan)), "the plan is not finite at step 9"),
    "short": (replace(REFERENCE, losses=LOSSES[:-1]), "the plan has 9 of 10 steps"),
}


@pytest.mark.parametrize(("plan", "words"), DAMAGED.values(), ids=DAMAGED)
def test_what_cannot_be_compared_never_follows(plan: Trajectory, words: str) -> None:
    found = checks(plan)["loss"]
    assert not follows(found)
    assert found.detail == words


def test_a_bound_that_would_let_a_fault_pass_says_so() -> None:
    wide = beside(norms_times(1 + 2 * MOST / MULTIPLE))
    found = checks(norms_times(MISSING_NORM), wide)["grad_norm"]
    assert not discriminates(found)


def test_bounds_that_would_let_half_an_update_pass_say_so() -> None:
    """Twins as far apart as the losses move: a rank that does not update is in them."""
    loose = replace(REFERENCE, losses=tuple(one + 0.6 * (LOSSES[0] - one) / MULTIPLE for one in LOSSES))
    half = replace(REFERENCE, losses=tuple(one + 0.5 * (LOSSES[0] - one) for one in LOSSES))
    assert not follows(checks(half)["loss"])
    found = checks(half, beside(loose))["loss"]
    assert follows(found)
    assert found.parts[1].passed
    assert not discriminates(found)


def test_no_step_and_no_twin_reproduce_nothing() -> None:
    empty = Trajectory((), ())
    found = [*checks(empty, beside(empty, run=empty)).values(), *checks(REFERENCE, beside()).values()]
    assert not any(follows(check) or check.passed for check in found)
    assert [check.detail for check in found] == ["there are 0 steps and 1 twins"] * 2 + [
        "there are 10 steps and 0 twins"
    ] * 2


def test_the_first_layer_and_step_that_are_off_are_named() -> None:
    whole = left_by(0) | {
        "stream_norms": {"layers.0": [1.0] * 10, "layers.1": [2.0] * 10},
        "part_norms": {"layers.0": [0.5] * 10, "layers.1": [0.5] * 10},
    }
    off = copy.deepcopy(whole)
    off["stream_norms"]["layers.1"][4:] = [2.1] * 6
    off["steps"][4]["loss"] *= 2
    reference = reference_of([run_of(whole).trajectory] * 3, run_of(whole).order)
    for receipt, said in (
        (off, "step 4, layers.1"),
        ({**whole, "steps": off["steps"]}, "no stream and no gradient of a part is off"),
    ):
        bench = new_bench()
        check_follows(bench, "reproduces", run_of(receipt).trajectory, reference)
        assert bench.checks[-1].detail == said
        assert ("reproduces.first-off" in failed(bench)) is (receipt is off)
