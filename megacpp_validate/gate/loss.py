"""The loss gate: may this FP8 recipe train in place of BF16? Curves in, verdict out.

Same seeds and same data make the difference between an FP8 run and its BF16 twin far smaller than the difference
between two seeds, so everything is judged on that *paired* gap, step by step; `loss_checks` describes the checks.

A curve is refused, and not failed, where nothing is known of its recipe: where it cannot be compared with the BF16 run
of the same seed, data, length and machine, or where BF16 is damaged. What is damaged in an FP8 curve is a failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Final, Literal

from .. import TOOL
from ..errors import Exit, exit_for
from ..evidence.loss_curve import CurveInvalid, LossCurve, read_curves
from ..evidence.receipt import Check, Part
from ..evidence.values import Frozen
from .loss_checks import (
    CAP,
    CASTS,
    REFERENCE,
    Pairs,
    check_curves,
    check_observed,
    find_noise,
    set_bars,
    smooth,
    subtract,
    to_json,
)

LEAST_SEEDS: Final = 3  # two seeds make one difference, from which no spread can be derived
LEAST_STEPS: Final = 100  # shorter runs leave fewer than ten steps to a smoothing window
SAME: Final = 2.0**-23  # of a loss: one step of fp32, which is what the loss is computed in
MADE_WITH: Final = ("gpu", "torch", "transformer_engine")  # what every curve records, the same in all

Curves = Sequence[LossCurve]


class LossOutcome(StrEnum):
    """How the gate decided. Only `PASS` is good."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"  # a check out of its bound
    REFUSED = "refused"  # the curves cannot be compared: nothing is known of the recipe


class SeedSeries(Frozen):
    """The smoothed curves of one seed, a value a step: each is the mean over the `window` steps that end there.

    Attributes:
        steps: number of the last step of each window.
        reference: smoothed loss of BF16, in nats.
        gap: smoothed loss of the candidate minus that of BF16, in nats.
    """

    seed: int
    steps: tuple[int, ...]
    reference: tuple[float, ...]
    gap: tuple[float, ...]


class LossVerdict(Frozen):
    """The gate's answer on one recipe.

    Attributes:
        of: the cell whose curves were judged; empty where they came from none.
        recipe: of the candidate; empty where the curves do not agree on one.
        outcome: what holds.
        refusals: why the curves cannot be compared; empty otherwise.
        checks: each with its observed value, its bound and where that comes from; empty if refused.
        window: number of steps of the smoothing.
        bar: what the smoothed gap of each seed may be at most in the second half, in nats.
        early_bar: the same in the first half.
        spread: the seed-to-seed spread of BF16 that the bar comes from, in nats; None where it overflows.
        series: smoothed curves of each seed; empty where a curve is damaged, or its sums overflow.
    """

    schema_id: Literal["megacpp-validate/loss-verdict/1"] = "megacpp-validate/loss-verdict/1"
    of: str = ""
    recipe: str
    outcome: LossOutcome
    refusals: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    window: int | None = None
    bar: float | None = None
    early_bar: float | None = None
    spread: float | None = None
    series: tuple[SeedSeries, ...] = ()


class LossGateResult(Frozen):
    """What the gate decided about every recipe of a folder.

    Attributes:
        tool: that decided.
        folder: whose curves were read.
        verdicts: of each cell and recipe.
    """

    schema_id: Literal["megacpp-validate/loss-gate/1"] = "megacpp-validate/loss-gate/1"
    tool: str
    folder: str
    verdicts: tuple[LossVerdict, ...]

    @property
    def holds(self) -> bool:
        """Whether there is a verdict, and every one is a pass."""
        return bool(self.verdicts) and all(verdict.outcome is LossOutcome.PASS for verdict in self.verdicts)

    @property
    def breaks(self) -> bool:
        """Whether a recipe failed; curves that cannot be compared are lost evidence."""
        return any(verdict.outcome is LossOutcome.FAIL for verdict in self.verdicts)

    @property
    def exit(self) -> Exit:
        """Closed where a recipe fails; evidence is missing where curves cannot be compared, or there are none."""
        return exit_for(breaks=self.breaks, lacks=not self.holds)


def judge_folder(folder: Path) -> LossGateResult:
    """The verdict on every FP8 recipe of every cell that left curves in a folder; none where there is no curve.

    An invalid file refuses the whole recipe that it is named after, and every recipe where it is BF16's.

    Raises:
        WrongArguments: there is no such folder.
    """
    verdicts = (verdict for cell, runs in read_curves(folder).items() for verdict in _decide_cell(cell, runs))
    return LossGateResult(tool=TOOL, folder=str(folder), verdicts=tuple(verdicts))


def _decide_cell(cell: str, runs: Mapping[str, Sequence[LossCurve | CurveInvalid]]) -> Iterator[LossVerdict]:
    """The verdicts on the recipes of one cell."""
    curves = {recipe: [run for run in of if isinstance(run, LossCurve)] for recipe, of in runs.items()}
    for recipe in sorted(runs.keys() - {REFERENCE}) or [""]:
        lost = [str(run) for one in (REFERENCE, recipe) for run in runs.get(one, ()) if isinstance(run, CurveInvalid)]
        if not recipe:
            lost.append(f"there are curves of {REFERENCE} alone. Next step: train the FP8 recipes too")
        if lost:
            yield LossVerdict(of=cell, recipe=recipe, outcome=LossOutcome.REFUSED, refusals=tuple(lost))
            continue
        others = [curve for one, of in curves.items() if one not in (REFERENCE, recipe) for curve in of]
        yield decide_loss(curves.get(REFERENCE, []), curves[recipe], others).model_copy(update={"of": cell})


def decide_loss(reference: Curves, candidate: Curves, others: Curves = ()) -> LossVerdict:
    """Decide on one FP8 recipe.

    Args:
        reference: BF16, at least three seeds.
        candidate: the recipe, with the same seeds, data and number of planned steps.
        others: runs of other FP8 recipes that trained the same model; layers that cast there must cast here.

    Returns:
        `REFUSED` with the reasons where the curves cannot be compared, or BF16 is damaged or none; `FAIL` where any
        check is out of its bound; else `PASS`. It never raises for what is in a curve.
    """
    recipe = next((curve.recipe for curve in candidate), "")
    if refusals := find_refusals(reference, candidate, others):
        return LossVerdict(recipe=recipe, outcome=LossOutcome.REFUSED, refusals=refusals)
    pairs = pair_by_seed(reference, candidate)
    steps = tuple(_check_steps(pair[side]) for side in (0, 1) for pair in pairs)
    if not all(check.passed for check in steps):
        return LossVerdict(recipe=recipe, outcome=LossOutcome.FAIL, checks=steps)
    bars, window = set_bars(pairs), pairs[0][0].planned // 10
    held = [check for _, fp8 in pairs for check in check_observed(fp8, [*candidate, *others])]
    checks = (*steps, *check_curves(pairs, bars), *held)
    series = tuple(_smooth_pair(bf16, fp8, window) for bf16, fp8 in pairs)
    finite = all(math.isfinite(value) for each in series for value in (*each.reference, *each.gap))
    return LossVerdict(
        recipe=recipe, outcome=LossOutcome.PASS if all(check.passed for check in checks) else LossOutcome.FAIL,
        checks=checks, window=window, bar=bars.settled, early_bar=bars.early, spread=to_json(bars.spread),
        series=series if finite else (),
    )  # fmt: skip


def pair_by_seed(reference: Curves, candidate: Curves) -> Pairs:
    """The BF16 run and the FP8 run of each seed, in the order of seeds; for curves that were not refused."""
    of_seed = {curve.seed: curve for curve in candidate}
    return tuple((curve, of_seed[curve.seed]) for curve in sorted(reference, key=lambda curve: curve.seed))


def _check_steps(curve: LossCurve) -> Check:
    damage = find_damage(curve)
    part = Part("faults", len(damage), 0, not damage, f"each of {curve.planned} steps once, in order and finite")
    return Check(f"steps.{curve.recipe}.seed{curve.seed}", not damage, (part,), "; ".join(damage))


def _smooth_pair(bf16: LossCurve, fp8: LossCurve, window: int) -> SeedSeries:
    gap = smooth(subtract(fp8.losses, bf16.losses), window)
    return SeedSeries(seed=bf16.seed, steps=bf16.steps[window - 1 :], reference=smooth(bf16.losses, window), gap=gap)


# --- Refusals: each is a sentence that ends with the next step. ---


def find_refusals(reference: Curves, candidate: Curves, others: Curves = ()) -> tuple[str, ...]:
    """Why these curves allow no verdict; empty if they do.

    Args:
        others: of other recipes of the same session: none of them may be one of these under another name.
    """
    unmatched = list(_find_wrong_sets(reference, candidate))
    matched = [] if unmatched else list(_find_wrong_pairs(reference, candidate, others))
    return (*unmatched, *matched, *_find_wrong_records(reference, candidate))


def find_damage(curve: LossCurve) -> tuple[str, ...]:
    """What is wrong with the record of one run: steps missing, repeated or out of order, numbers not finite."""
    found = []
    pairs = enumerate(zip_longest(curve.steps, range(curve.planned)))
    if odd := [place for place, (step, planned) in pairs if step != planned]:
        found.append(
            f"it has {len(curve.steps)} of {curve.planned} steps; step {odd[0]} is the first that is missing, repeated "
            "or out of order"
        )
    norms = {"gradient norm": curve.gradient_norms}
    norms |= {f"gradient norm of {part}": values for part, values in curve.part_norms.items()}
    losses = {"loss": curve.losses} | {f"loss of {part}": values for part, values in curve.part_losses.items()}
    for name, values in (losses | norms).items():
        odd = [step for step, value in zip(curve.steps, values, strict=False) if not math.isfinite(value)]
        if odd:
            found.append(f"the {name} of {len(odd)} steps is not finite, the first is step {odd[0]}")
        if (name in norms or name == "loss") and any(value < 0 for value in values):
            found.append(f"a {name} is below 0")
    return tuple(found)


def _find_wrong_sets(reference: Curves, candidate: Curves) -> Iterator[str]:
    """Seeds that do not make pairs."""
    has, got = (Counter(curve.seed for curve in curves) for curves in (reference, candidate))
    twice = sorted(seed for counted in (has, got) for seed, times in counted.items() if times > 1)
    lacking, surplus = sorted(has.keys() - got.keys()), sorted(got.keys() - has.keys())
    for broken, text in (
        (twice, f"the seeds {twice} have more than one curve. Next step: give one curve a seed"),
        (len(has) < LEAST_SEEDS,
         f"the reference has {len(has)} of at least {LEAST_SEEDS} seeds. Next step: train more of {REFERENCE}"),
        (lacking, f"the candidate lacks the seeds {lacking} of the reference. Next step: train it with the same seeds"),
        (surplus, f"the reference lacks the seeds {surplus} of the candidate. Next step: train it with the same seeds"),
    ):  # fmt: skip
        if broken:
            yield text


def _find_wrong_pairs(reference: Curves, candidate: Curves, others: Curves) -> Iterator[str]:
    """Runs of other lengths or data, and one run under two names: two seeds or recipes differ from the first step."""
    lengths = sorted({curve.planned for curve in (*reference, *candidate)})
    if len(lengths) > 1:
        yield f"runs of {' and '.join(map(str, lengths))} steps were planned. Next step: train all for one length"
    elif lengths[0] < LEAST_STEPS:
        yield f"the runs have {lengths[0]} of at least {LEAST_STEPS} steps. Next step: train longer"
    pairs = list(pair_by_seed(reference, candidate))
    for bf16, fp8 in pairs:
        if bf16.data != fp8.data:
            yield f"{_name(fp8)} saw other data than that of {REFERENCE}. Next step: train both on the same data"
    pairs += [pair for curves in (reference, candidate) for pair in combinations(curves, 2)]
    pairs += [(one, other) for one in candidate for other in others]
    for one, other in pairs:
        if _are_same(one, other):
            yield (
                f"{_name(one)} and {_name(other)} have the same losses for more than a tenth of the run. Likely cause: "
                "FP8 never ran there, the weights were not seeded, or a curve was copied. Next step: look at the "
                "quantizers that the recipe probe observed, and train each of them"
            )


def _are_same(one: LossCurve, other: LossCurve) -> bool:
    """Whether two runs have the same loss to fp32 in more steps in a row than a window of the smoothing has.

    Two runs that differ in anything pass through the same loss now and then, and where few digits are written more
    often; not for a tenth of all steps in a row. A loss that stands still is no sign of a copy.
    """
    best, start = range(0), 0
    for place, (a, b) in enumerate(zip(one.losses, other.losses, strict=False)):
        if not abs(a - b) <= SAME * abs(a):
            start = place + 1
        elif place + 1 - start > len(best):
            best = range(start, place + 1)
    values = {one.losses[place] for place in best}
    return len(best) > max(one.planned // 10, 1) and len(values) > len(best) // 2


def _find_wrong_records(reference: Curves, candidate: Curves) -> Iterator[str]:
    """Recipes that are not known, references that are none, other machines."""
    if unknown := sorted({curve.recipe for curve in candidate} - CASTS.keys() - {REFERENCE}):
        yield f"the recipe {unknown[0]!r} is unknown. Next step: give curves of one of {', '.join(CASTS)}"
    for curve in reference:
        if curve.recipe == REFERENCE:
            if damage := find_damage(curve):
                yield f"{_name(curve)} is damaged: {'; '.join(damage)}. Next step: train it again"
            elif why := _find_no_learning(curve):
                yield f"{_name(curve)} is not a reference: {why}. Next step: fix the training in {REFERENCE} first"
            if curve.quantizers or curve.histories:
                yield f"{_name(curve)} trained in low precision. Next step: train it outside of every FP8 scope"
    curves = (*reference, *candidate)
    for what in sorted({*MADE_WITH, *(key for curve in curves for key in curve.made_with)}):
        values = sorted({curve.made_with.get(what, "") for curve in curves})
        if len(values) > 1 or (what in MADE_WITH and "" in values):
            listed = " and ".join(value or "none" for value in values)
            yield f"the runs record as their {what}: {listed}. Next step: train all of them in one place"


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
        return f"its smoothed loss falls by {fall:.4f} nats, and the gate looks for differences of {CAP}"
    if not rise <= CAP + 4 * find_noise(curve.losses) / math.sqrt(window):
        return f"its smoothed loss ends {rise:.4f} nats above its lowest: it diverged"
    return ""


def _name(curve: LossCurve) -> str:
    return f"the run of {curve.recipe} with seed {curve.seed}"
