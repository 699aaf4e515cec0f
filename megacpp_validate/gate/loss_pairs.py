"""Which loss curves can be compared: each FP8 run with the BF16 run of the same seed, data and length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from megacpp_validate.evidence.loss_curve import LossCurve

REFERENCE = "bf16"
LEAST_SEEDS = 3  # two seeds make one difference, from which no spread can be told
LEAST_STEPS = 100  # shorter runs leave fewer than ten steps to a smoothing window
SAME: Final = 2.0**-23  # of a loss: one step of fp32, which is what the loss is computed in


def find_refusals(
    reference: Sequence[LossCurve], candidate: Sequence[LossCurve], others: Sequence[LossCurve] = ()
) -> tuple[str, ...]:
    """Why these curves cannot be compared; each says what to do. Empty if they can.

    `others` are of other recipes of the same session: none of them may be one of these under another name. What is
    damaged in a curve (steps, numbers) is no reason to refuse it: it is a failure.
    """
    return (*_find_wrong_recipes(reference, candidate), *_find_wrong_seeds(reference, candidate)) or (
        *_find_wrong_pairs(reference, candidate),
        *_find_copies(reference, candidate, others),
    )


def pair_by_seed(
    reference: Sequence[LossCurve], candidate: Sequence[LossCurve]
) -> tuple[tuple[LossCurve, LossCurve], ...]:
    """The BF16 run and the FP8 run of each seed, in the order of seeds; for curves that were not refused."""
    of_seed = {curve.seed: curve for curve in candidate}
    return tuple((curve, of_seed[curve.seed]) for curve in sorted(reference, key=lambda curve: curve.seed))


def find_damage(curve: LossCurve) -> tuple[str, ...]:
    """What is wrong with the record of one run: steps missing, repeated or out of order, numbers not finite."""
    said = []
    counts = Counter(curve.steps)
    wanted = range(curve.planned)
    if missing := [step for step in wanted if step not in counts]:
        said.append(
            f"{len(missing)} of {_count(curve.planned, 'step')} {_be(missing)} missing, the first is step {missing[0]}"
        )
    if repeated := sorted(step for step, times in counts.items() if times > 1):
        said.append(f"{_count(len(repeated), 'step')} {_be(repeated)} repeated, the first is step {repeated[0]}")
    if strange := sorted(step for step in counts if step not in wanted):
        said.append(
            f"{_count(len(strange), 'step')} {_be(strange)} none of the {curve.planned} planned, the first is step "
            f"{strange[0]}"
        )
    backwards = [after for before, after in zip(curve.steps, curve.steps[1:], strict=False) if after < before]
    if backwards:
        said.append(f"steps are out of order, the first that comes after a later one is step {backwards[0]}")
    recorded = [("loss", curve.losses), ("gradient norm", curve.gradient_norms)]
    recorded += [(f"loss of {part}", values) for part, values in curve.part_losses.items()]
    recorded += [(f"gradient norm of {part}", values) for part, values in curve.part_norms.items()]
    for name, series in recorded:
        if len(series) != len(curve.steps):
            said.append(f"{_count(len(curve.steps), 'step')} and {_count(len(series), 'value')} of the {name}")
        elif not_finite := [step for step, value in zip(curve.steps, series, strict=True) if not math.isfinite(value)]:
            said.append(
                f"the {name} of {_count(len(not_finite), 'step')} is not finite, the first is step {not_finite[0]}"
            )
    if any(value < 0 for series in (curve.gradient_norms, *curve.part_norms.values()) for value in series):
        said.append("a gradient norm is below 0")
    if any(value < 0 for value in curve.losses):
        said.append("a loss is below 0, which no mean of -log(probability) is")
    return tuple(said)


def _find_wrong_recipes(reference: Sequence[LossCurve], candidate: Sequence[LossCurve]) -> Iterator[str]:
    if wrong := sorted({curve.recipe for curve in reference} - {REFERENCE}):
        yield f"the reference has curves of {', '.join(wrong)}; next step: give it curves of {REFERENCE} alone"
    recipes = sorted({curve.recipe for curve in candidate})
    if len(recipes) > 1:
        yield f"the candidate mixes {', '.join(recipes)}; next step: decide one recipe at a time"
    if REFERENCE in recipes:
        yield f"the candidate has curves of {REFERENCE}; next step: give it the curves of an FP8 recipe"


def _find_wrong_seeds(reference: Sequence[LossCurve], candidate: Sequence[LossCurve]) -> Iterator[str]:
    seeds = [Counter(curve.seed for curve in curves) for curves in (reference, candidate)]
    for name, counted in zip(("reference", "candidate"), seeds, strict=True):
        if twice := sorted(seed for seed, times in counted.items() if times > 1):
            yield f"the {name} has seed {twice[0]} more than once; next step: give one curve a seed"
    if len(seeds[0]) < LEAST_SEEDS:
        yield (
            f"the reference has {_count(len(seeds[0]), 'seed')}, {LEAST_SEEDS} at least are needed to tell their "
            f"spread; next step: train {REFERENCE} with more seeds"
        )
    if lacking := sorted(seeds[0].keys() - seeds[1].keys()):
        yield f"the candidate lacks seed {lacking[0]} of the reference; next step: train it with the same seeds"
    if beyond := sorted(seeds[1].keys() - seeds[0].keys()):
        yield f"the reference lacks seed {beyond[0]} of the candidate; next step: train it with the same seeds"


def _find_wrong_pairs(reference: Sequence[LossCurve], candidate: Sequence[LossCurve]) -> Iterator[str]:
    if len(lengths := sorted({curve.planned for curve in (*reference, *candidate)})) > 1:
        yield f"runs of {' and '.join(map(str, lengths))} steps were planned; next step: train all for one length"
    elif lengths[0] < LEAST_STEPS:
        yield f"runs of {_count(lengths[0], 'step')}, {LEAST_STEPS} at least are needed; next step: train longer"
    for bf16, fp8 in pair_by_seed(reference, candidate):
        if bf16.data != fp8.data:
            yield (
                f"seed {bf16.seed} saw other data in {fp8.recipe} ({fp8.data[:12]}) than in {REFERENCE} "
                f"({bf16.data[:12]}); next step: train both on the same data in the same order"
            )
        if same := _find_same(bf16, fp8):
            yield (
                f"seed {bf16.seed} has the very same losses in {fp8.recipe} as in {REFERENCE}, {_say_same(same, bf16)}"
                ": FP8 never ran there, or a curve was copied; next step: look at the quantizers that the recipe probe "
                "observed"
            )
    for curves in (reference, candidate):
        if len({curve.losses for curve in curves}) < len(curves):
            name = curves[0].recipe
            yield f"two seeds of {name} are the same curve: the seed is not used; next step: seed the weights"


def _find_copies(
    reference: Sequence[LossCurve], candidate: Sequence[LossCurve], others: Sequence[LossCurve]
) -> Iterator[str]:
    """One run under two names. Two seeds, and two recipes, take other ways from the first step on."""
    pairs = [(one, other) for curves in (reference, candidate) for one, other in combinations(curves, 2)]
    pairs += [(one, other) for one in candidate for other in others]
    for one, other in pairs:
        if (one.losses != other.losses or other in others) and (
            same := _find_same(one, other)
        ):  # whole copies of BF16 have their own words
            names = [f"{curve.recipe} with seed {curve.seed}" for curve in (one, other)]
            yield (
                f"{' and '.join(names)} have the very same losses, {_say_same(same, one)}: one of them was copied; "
                "next step: train each of them"
            )


def _find_same(one: LossCurve, other: LossCurve) -> range:
    """The longest row of steps with the same loss to fp32, if it is longer than a window of the smoothing.

    Two runs that differ in anything pass through the same loss now and then, and where few digits are told more often;
    not for a tenth of all steps in a row.
    """
    best, start = range(0), 0
    for place, (a, b) in enumerate(zip(one.losses, other.losses, strict=False)):
        if not abs(a - b) <= SAME * abs(a):
            start = place + 1
        elif place + 1 - start > len(best):
            best = range(start, place + 1)
    told = {one.losses[place] for place in best}  # a loss that stands still is no sign of a copy
    return best if len(best) > max(one.planned // 10, 1) and len(told) > len(best) // 2 else range(0)


def _say_same(same: range, curve: LossCurve) -> str:
    whole = len(same) == curve.planned
    return "in every step" if whole else f"from step {same.start} to step {same.stop - 1}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _be(steps: Sequence[int]) -> str:
    return "is" if len(steps) == 1 else "are"
