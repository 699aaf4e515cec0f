"""Why loss curves cannot be compared: each FP8 run with the BF16 run of the same seed, data, length and machine.

Here a curve is refused, not failed: nothing is known of its recipe then. What is damaged in an FP8 curve is a failure,
and so is no reason to refuse it. Each reason ends with the next step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Final

from ..evidence.loss_curve import CURVE_SCHEMA_ID, LossCurve
from .loss_observed import CASTS
from .loss_statistics import CAP, find_noise, smooth

REFERENCE: Final = "bf16"
LEAST_SEEDS: Final = 3  # two seeds make one difference, from which no spread can be told
LEAST_STEPS: Final = 100  # shorter runs leave fewer than ten steps to a smoothing window
SAME: Final = 2.0**-23  # of a loss: one step of fp32, which is what the loss is computed in
MADE_WITH: Final = ("gpu", "torch", "transformer_engine")  # what every curve records, the same in all

Curves = Sequence[LossCurve]
Pairs = tuple[tuple[LossCurve, LossCurve], ...]


def find_refusals(reference: Curves, candidate: Curves, others: Curves = ()) -> tuple[str, ...]:
    """Why these curves allow no verdict; empty if they do.

    Args:
        others: of other recipes of the same session: none of them may be one of these under another name.
    """
    matched = tuple(_find_wrong_sets(reference, candidate))
    if not matched:
        matched = (*_find_wrong_pairs(reference, candidate), *_find_copies(reference, candidate, others))
    return (*matched, *_find_wrong_records(reference, candidate))


def pair_by_seed(reference: Curves, candidate: Curves) -> Pairs:
    """The BF16 run and the FP8 run of each seed, in the order of seeds; for curves that were not refused."""
    of_seed = {curve.seed: curve for curve in candidate}
    return tuple((curve, of_seed[curve.seed]) for curve in sorted(reference, key=lambda curve: curve.seed))


def find_damage(curve: LossCurve) -> tuple[str, ...]:
    """What is wrong with the record of one run: steps missing, repeated or out of order, numbers not finite."""
    found = []
    counts, planned = Counter(curve.steps), range(curve.planned)
    for words, steps in (
        ("missing", [step for step in planned if step not in counts]),
        ("repeated", sorted(step for step, times in counts.items() if times > 1)),
        ("not planned", sorted(step for step in counts if step not in planned)),
        ("out of order", [after for before, after in pairwise(curve.steps) if after < before]),
    ):
        if steps:
            found.append(f"{len(steps)} of {curve.planned} steps are {words}, the first is step {steps[0]}")
    series = {"loss": curve.losses, "gradient norm": curve.gradient_norms}
    series |= {f"loss of {part}": values for part, values in curve.part_losses.items()}
    series |= {f"gradient norm of {part}": values for part, values in curve.part_norms.items()}
    for name, values in series.items():
        odd = [step for step, value in zip(curve.steps, values, strict=False) if not math.isfinite(value)]
        if len(values) != len(curve.steps):
            found.append(f"{len(curve.steps)} steps have {len(values)} values of the {name}")
        elif odd:
            found.append(f"the {name} of {len(odd)} steps is not finite, the first is step {odd[0]}")
        if any(value < 0 for value in values) and not name.startswith("loss of"):
            found.append(f"a {name} is below 0")
    return tuple(found)


def _find_wrong_sets(reference: Curves, candidate: Curves) -> Iterator[str]:
    """Recipes and seeds that do not make pairs."""
    if wrong := sorted({curve.recipe for curve in reference} - {REFERENCE}):
        yield f"the reference has curves of {', '.join(wrong)}. Next step: give it curves of {REFERENCE} alone"
    recipes = sorted({curve.recipe for curve in candidate})
    if len(recipes) > 1:
        yield f"the candidate mixes {', '.join(recipes)}. Next step: decide one recipe at a time"
    if REFERENCE in recipes:
        yield f"the candidate has curves of {REFERENCE}. Next step: give it the curves of an FP8 recipe"
    seeds = [Counter(curve.seed for curve in curves) for curves in (reference, candidate)]
    for name, counted in zip(("reference", "candidate"), seeds, strict=True):
        if twice := sorted(seed for seed, times in counted.items() if times > 1):
            yield f"the {name} has seed {twice[0]} more than once. Next step: give one curve a seed"
    if len(seeds[0]) < LEAST_SEEDS:
        yield f"the reference has {len(seeds[0])} of at least {LEAST_SEEDS} seeds. Next step: train more of {REFERENCE}"
    for name, has, other in (("candidate", seeds[1], seeds[0]), ("reference", seeds[0], seeds[1])):
        if lacking := sorted(other.keys() - has.keys()):
            yield f"the {name} lacks seed {lacking[0]} of the other side. Next step: train it with the same seeds"


def _find_wrong_pairs(reference: Curves, candidate: Curves) -> Iterator[str]:
    lengths = sorted({curve.planned for curve in (*reference, *candidate)})
    if len(lengths) > 1:
        yield f"runs of {' and '.join(map(str, lengths))} steps were planned. Next step: train all for one length"
    elif lengths[0] < LEAST_STEPS:
        yield f"the runs have {lengths[0]} of at least {LEAST_STEPS} steps. Next step: train longer"
    for bf16, fp8 in pair_by_seed(reference, candidate):
        if bf16.data != fp8.data:
            yield f"{_name(fp8)} saw other data than that of {REFERENCE}. Next step: train both on the same data"
        if same := _find_same(bf16, fp8):
            yield (
                f"{_name(fp8)} has the losses of {REFERENCE} in {len(same)} steps in a row. Likely cause: FP8 never "
                "ran there, or a curve was copied. Next step: look at the quantizers that the recipe probe observed"
            )
    for curves in (reference, candidate):
        if len({curve.losses for curve in curves}) < len(curves):
            yield f"two seeds of {curves[0].recipe} are the same curve. Next step: seed the weights"


def _find_copies(reference: Curves, candidate: Curves, others: Curves) -> Iterator[str]:
    """One run under two names. Two seeds, and two recipes, take other ways from the first step on."""
    pairs = [(one, other) for curves in (reference, candidate) for one, other in combinations(curves, 2)]
    pairs += [(one, other) for one in candidate for other in others]
    for one, other in pairs:
        if (one.losses != other.losses or other in others) and _find_same(one, other):  # whole copies: as above
            yield f"{_name(one)} and {_name(other)} have the same losses: one was copied. Next step: train each of them"


def _find_same(one: LossCurve, other: LossCurve) -> range:
    """The longest row of steps with the same loss to fp32, if it is longer than a window of the smoothing.

    Two runs that differ in anything pass through the same loss now and then, and where few digits are told more often;
    not for a tenth of all steps in a row. A loss that stands still is no sign of a copy.
    """
    best, start = range(0), 0
    for place, (a, b) in enumerate(zip(one.losses, other.losses, strict=False)):
        if not abs(a - b) <= SAME * abs(a):
            start = place + 1
        elif place + 1 - start > len(best):
            best = range(start, place + 1)
    values = {one.losses[place] for place in best}
    return best if len(best) > max(one.planned // 10, 1) and len(values) > len(best) // 2 else range(0)


def _find_wrong_records(reference: Curves, candidate: Curves) -> Iterator[str]:
    """Recipes that are not known, records of an older schema, references that are none, other machines."""
    curves = (*reference, *candidate)
    if unknown := sorted({curve.recipe for curve in candidate} - CASTS.keys() - {REFERENCE}):
        yield f"the recipe {unknown[0]!r} is unknown. Next step: give curves of one of {', '.join(CASTS)}"
    if old := [curve for curve in curves if curve.schema_id != CURVE_SCHEMA_ID]:
        yield (
            f"{len(old)} of {len(curves)} runs have no record of what their layers held, the first is {_name(old[0])}, "
            f"a {old[0].schema_id}. Next step: train again, which leaves a {CURVE_SCHEMA_ID} of each"
        )
    for curve in reference:
        if curve.recipe == REFERENCE:
            if damage := find_damage(curve):
                yield f"{_name(curve)} is damaged: {'; '.join(damage)}. Next step: train it again"
            elif why := _find_no_learning(curve):
                yield f"{_name(curve)} is no reference: {why}. Next step: fix the training in {REFERENCE} first"
            if curve.quantizers or curve.histories:
                yield f"{_name(curve)} trained in low precision. Next step: train it outside of every FP8 scope"
    recent = [curve for curve in curves if curve.schema_id == CURVE_SCHEMA_ID]  # the others have no such record
    for what in sorted({*MADE_WITH, *(key for curve in curves for key in curve.made_with)}):
        values = sorted({curve.made_with[what] for curve in curves if what in curve.made_with})
        if lacking := [curve for curve in recent if not (curve.made_with.get(what) or _may_be_empty(what, curve))]:
            yield f"{_name(lacking[0])} does not record its {what}. Next step: train all of them in one place"
        if len(values) > 1:
            yield f"the runs had different {what}: {' and '.join(values)}. Next step: train all of them in one place"


def _may_be_empty(what: str, curve: LossCurve) -> bool:
    return what not in MADE_WITH and what in curve.made_with


def _find_no_learning(curve: LossCurve) -> str:
    """Why a whole run of BF16 shows nothing: where nothing is learned, nothing can be lost; empty where it shows it.

    It falls by more than FP8 may be off by, and ends no more than that above its lowest, in means of a tenth of the
    run; with four deviations of such a mean, of steps that differ as neighbours do.
    """
    window = max(curve.planned // 10, 1)
    means = smooth(curve.losses, window)
    lowest = min(means)
    fall, rise = means[0] - lowest, means[-1] - lowest
    if not fall > CAP:
        return f"its smoothed loss falls by {fall:.4f} nats, and what is looked for is {CAP}"
    if not rise <= CAP + 4 * find_noise(curve.losses) / math.sqrt(window):
        return f"its smoothed loss ends {rise:.4f} nats above its lowest: it diverged"
    return ""


def _name(curve: LossCurve) -> str:
    return f"the run of {curve.recipe} with seed {curve.seed}"
