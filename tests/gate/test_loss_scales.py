"""What a long mean levels out: spikes that recover, swings, last steps, noise, parts; each beside what seeds do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.gate.loss import decide_loss
from megacpp_validate.gate.loss_result import LossOutcome
from megacpp_validate.gate.loss_scales import lengths, means
from megacpp_validate.gate.loss_statistics import smooth
from tests.gate.h200_curves import curve_of
from tests.gate.small_curves import STEPS, make_curve

NOISE = 0.0005  # nats a step, of each run
Gap = Callable[[int], float]


def run(recipe: str, seed: int, gap: Gap = lambda _: 0.0, noise: float = NOISE) -> LossCurve:
    """A loss that falls from 3 to 2 with noise of its own, and two parts of the data that do the same."""
    own = random.Random(f"{recipe}-{seed}")
    losses = [2 + math.exp(-step / 20) + own.gauss(0, noise) + gap(step) for step in range(STEPS)]
    curve = make_curve(recipe, seed, losses, [math.exp(own.gauss(0, 0.01)) for _ in range(STEPS)])
    return replace(curve, part_losses={"loud": tuple(losses), "quiet": tuple(loss + 0.25 for loss in losses)})


REFERENCE = [run("bf16", seed) for seed in range(3)]


def failed(gap: Gap = lambda _: 0.0, noise: float = NOISE, reference: Sequence[LossCurve] = ()) -> set[str]:
    curves = [run("delayed", 0, gap, noise), *(run("delayed", seed) for seed in (1, 2))]
    return failures(reference or REFERENCE, curves)


def failures(reference: Sequence[LossCurve], curves: Sequence[LossCurve]) -> set[str]:
    verdict = decide_loss(reference, curves)
    assert verdict.outcome is not LossOutcome.REFUSED, verdict.refusals
    return {check.name.partition(".seed")[0] for check in verdict.checks if not check.passed}


HARMLESS: dict[str, Gap] = {
    "nothing": lambda _: 0.0,
    "a step as far off as noise goes": lambda step: 3 * NOISE * (step == 70),
    "a swing within noise": lambda step: NOISE * math.sin(step),
    "a gap within the spread of seeds": lambda _: NOISE / 5,
}
FAULTS: dict[str, tuple[Gap, str]] = {
    "a spike that recovers": (lambda step: 0.03 * (step == 70), "gap.short.settled"),
    "a spike downwards": (lambda step: -0.03 * (step == 70), "gap.short.settled"),
    "two spikes that cancel": (lambda step: 0.03 * ((step == 70) - (step == 73)), "gap.short.settled"),
    "a swing of four steps": (lambda step: 0.01 * math.sin(step * math.pi / 2 + 0.5), "gap.short.settled"),
    "to and fro": (lambda step: 0.02 * (-1) ** step, "gap.noise.settled"),
    "the last two steps": (lambda step: 0.02 * (step >= STEPS - 2), "gap.short.settled"),
    "a spike while learning": (lambda step: 0.2 * (step == 30), "gap.short.learning"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_seeds_do_passes(name: str) -> None:
    assert failed(HARMLESS[name]) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_long_mean_levels_out_fails(name: str) -> None:
    gap, check = FAULTS[name]
    assert check in failed(gap)


@pytest.mark.parametrize(("times", "fails"), [(1.5, False), (6.0, True)])
def test_noise_that_has_grown_fails(times: float, fails: bool) -> None:
    assert ("gap.noise.settled" in failed(noise=times * NOISE)) is fails


@pytest.mark.parametrize(("gap", "fails"), [(0.0, False), (5 * NOISE / math.sqrt(STEPS / 10), True)])
def test_the_farthest_of_sixteen_seeds_passes_where_chance_takes_it(gap: float, fails: bool) -> None:
    """Runs like BF16's; and one of them off by five times what a mean over a window deviates by."""
    seeds = range(200, 216)
    curves = [run("delayed", seed, lambda step, off=gap * (seed == 207): off * (step >= 60)) for seed in seeds]  # type: ignore[misc]
    assert ("gap.settled" in failures([run("bf16", seed) for seed in seeds], curves)) is fails


def test_a_spike_that_bf16_has_too_passes() -> None:
    """A bad batch: every run of it jumps."""
    bad: Gap = lambda step: 0.5 * (step == 70)  # noqa: E731
    assert failures([run("bf16", s, bad) for s in range(3)], [run("delayed", s, bad) for s in range(3)]) == set()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_part_that_strays_alone_is_named(seed: int) -> None:
    """The whole stays where it is."""
    curves = [run("delayed", one) for one in range(3)]
    quiet = tuple(loss + 0.02 * (step >= 50) for step, loss in enumerate(curves[seed].part_losses["quiet"]))
    curves[seed] = replace(curves[seed], part_losses={**curves[seed].part_losses, "quiet": quiet})
    verdict = decide_loss(REFERENCE, curves)
    (check,) = [check for check in verdict.checks if not check.passed]
    assert check.name == "part_loss.settled"
    assert check.detail.startswith(f"quiet, seed {seed}, ")


def test_a_part_that_one_run_did_not_record_fails() -> None:
    curves = [run("delayed", one) for one in range(3)]
    curves[1] = replace(curves[1], part_losses={"loud": curves[1].losses})
    assert failures(REFERENCE, curves) == {"part_loss.recorded"}


def test_a_burst_of_gradients_fails() -> None:
    curves = [run("delayed", one) for one in range(3)]
    burst = tuple(norm * (5 if step >= STEPS - 3 else 1) for step, norm in enumerate(curves[1].gradient_norms))
    assert failures(REFERENCE, [curves[0], replace(curves[1], gradient_norms=burst), curves[2]]) == {
        "gradient_norm.short",
        "gradient_norm.noise.settled",
    }


def test_real_curves_with_a_spike_in_one_seed() -> None:
    """0.2 nats in one step of a thousand: 0.002 in the mean of a hundred."""
    bf16, delayed = ([curve_of(recipe, "none", seed) for seed in range(3)] for recipe in ("bf16", "delayed"))
    losses = list(delayed[1].losses)
    losses[700] += 0.2
    spiked = [delayed[0], replace(delayed[1], losses=tuple(losses)), delayed[2]]
    assert failures(bf16, spiked) == {"gap.short.settled", "gap.noise.settled"}


def test_real_gradients_with_a_late_burst_are_held_to_what_seeds_do_late() -> None:
    """Three times as large for ten steps: while they learn seeds are as far apart, and not in the second half."""
    bf16, delayed = ([curve_of(recipe, "none", seed) for seed in range(3)] for recipe in ("bf16", "delayed"))
    norms = tuple(norm * (3 if 700 <= step < 710 else 1) for step, norm in enumerate(delayed[0].gradient_norms))
    assert failures(bf16, [replace(delayed[0], gradient_norms=norms), *delayed[1:]]) == {"gradient_norm.short"}


@pytest.mark.parametrize(("times", "fails"), [(1.2, set()), (20.0, {"gradient_norm.noise.settled"})])
def test_real_gradients_that_spike_again_and_again_fail(times: float, fails: set[str]) -> None:
    """One step in fifty, each within what a single step of a seed may be off."""
    bf16, delayed = ([curve_of(recipe, "none", seed) for seed in range(3)] for recipe in ("bf16", "delayed"))
    norms = tuple(norm * (times if step % 50 == 25 else 1) for step, norm in enumerate(delayed[2].gradient_norms))
    found = failures(bf16, [*delayed[:2], replace(delayed[2], gradient_norms=norms)])
    assert fails <= found if fails else not found


def test_a_mean_in_one_pass_is_that_of_each_window() -> None:
    values = [float(step * step % 17) for step in range(40)]
    for window in lengths(12):
        assert means(values, window) == pytest.approx(smooth(values, window))
    assert lengths(100) == (1, 2, 4, 8, 16, 32, 64, 100)
    assert lengths(1) == (1,)
