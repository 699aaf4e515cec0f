"""The loss gate: may this FP8 recipe train in place of BF16? Curves in, verdict out.

Same seeds and same data make the difference between an FP8 run and its BF16 twin far smaller than the difference
between two seeds, so everything is judged on that *paired* gap, step by step. A curve is refused, and not failed, where
it cannot be compared with the BF16 run of the same seed, data, length and machine, or where BF16 is damaged. What is
damaged in an FP8 curve is a failure.

A spike that recovers, a swing whose ups and downs cancel, a run that leaves in its last steps, a noise that has grown:
each is far beyond what two seeds of BF16 do over as many steps, and nothing of it is left in a long mean. So gaps are
smoothed over 1, 2, 4, ... steps up to a tenth of the run.

- `gap.settled`, `gap.learning`: the gap of each seed over a tenth of the run, in its second and its first half. The bar
  is how far two BF16 seeds may lie apart by chance where they differ most, and 0.01 nats at most: few seeds, or seeds
  that differ much, never buy more room than that. After the first tenth `gap.learning` has a bar of its own: what seeds
  do at the start is no excuse later.
- `gap.tail`: the bias over the last fifth, mean over seeds. Noise averages out there and a fault does not.
- `gap.short`: over shorter windows. The cap of a window is that of the long one times the square root of how many of it
  the long one holds.
- `gap.noise`, `gradient_norm.noise`: from step to step, beside the noisiest difference of two BF16 seeds; twice that at
  most. It comes from differences of neighbours, so that nothing slow is in it.
- `gradient_norm.short`: bursts, once weights have drifted apart, in each half.
- `part_loss`: the loss of each part of the data. A part moves the whole by its share, so that its cap is that of the
  whole times the number of parts; while it is learned, seeds alone are the bar.
- `gradient_norm.matched`, `.later`, `part_norm.first`, `.matched`, `.later`: medians of the ratio of norms, which Adam
  hides from the loss; of the seed that is farthest off. Over the first twentieth FP8 and BF16 still have nearly the
  same weights, so that the ratio is that of the arithmetic: a scaled loss, however little. Later weights have drifted
  apart as seeds do, and only parts that vanish or blow up are seen. A norm of 0 beside one that is not is infinitely
  far off.
- `observed`: what the layers held, as `loss_casts` describes.

No bar is computed from the candidate, and none of the numbers gets smaller when a gap is scaled up. A t-test has not
that property: one seed far off raises the standard error, and with it the bar.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate, chain, combinations, pairwise
from pathlib import Path
from typing import Final, Literal

from ..errors import Exit, exit_for
from ..evidence.loss_curve import CurveInvalid, LossCurve, read_curves
from ..evidence.receipt import Check, Part
from ..evidence.values import Frozen, Result
from .loss_casts import CASTS, check_casts

REFERENCE: Final = "bf16"
CAP: Final = 0.01  # nats: what the smoothed loss of FP8 may be off by at most, however far seeds are apart
GROWTH: Final = 2.0  # of what two seeds of BF16 were seen to differ by
SMALLEST_SCALING: Final = 1.03
MATCHED: Final = math.log(SMALLEST_SCALING) / 2
LATER: Final = 2 * math.log(SMALLEST_SCALING)
NORM_CAP: Final = math.log(2)  # of those bars: whatever halves or doubles a gradient is seen, however seeds differ
# Healthy runs of the same seed wander apart: by 3.1 at most in a part, on an H200 on 2026-11-21. What is looked for is
# off by 2^10 and more, or 0.
VANISHING: Final = math.log(16)
FEWEST: Final = 5  # steps of a median that one spike and the first step of delayed scaling leave alone

# Student's t by number of seeds, two-sided: of one more seed at 95%, and of the farthest of all of them, each of which
# is held to 3 / seeds of those 5%, which keeps the chance of all at that of three (Bonferroni). A number of seeds that
# is not listed has the row of the next smaller one.
_STUDENT: Final = {
    3: (4.303, 4.303), 4: (3.182, 3.572), 5: (2.776, 3.298), 6: (2.571, 3.163), 7: (2.447, 3.089), 8: (2.365, 3.044),
    9: (2.306, 3.016), 10: (2.262, 2.998), 16: (2.131, 2.978),
}  # fmt: skip

Pairs = tuple[tuple[LossCurve, LossCurve], ...]  # BF16 and FP8 of each seed
Series = Mapping[int, tuple[Sequence[float], Sequence[float]]]  # seed -> values of BF16 and of FP8, a step each
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


class LossGateResult(Result):
    """What the gate decided about every recipe of a folder.

    Attributes:
        folder: whose curves were read.
        verdicts: of each cell and recipe.
    """

    schema_id: Literal["megacpp-validate/loss-gate/1"] = "megacpp-validate/loss-gate/1"
    folder: str
    verdicts: tuple[LossVerdict, ...]

    @property
    def exit(self) -> Exit:
        """Closed where a recipe fails; evidence is missing where curves cannot be compared, or there are none."""
        outcomes = {verdict.outcome for verdict in self.verdicts}
        return exit_for(breaks=LossOutcome.FAIL in outcomes, lacks=outcomes != {LossOutcome.PASS})


def judge_folder(folder: Path) -> LossGateResult:
    """The verdict on every FP8 recipe of every cell that left curves in a folder; none where there is no curve.

    Raises:
        WrongArguments: there is no such folder.
    """
    verdicts = (verdict for cell, runs in read_curves(folder).items() for verdict in _decide_cell(cell, runs))
    return LossGateResult(folder=str(folder), verdicts=tuple(verdicts))


def _decide_cell(cell: str, runs: Mapping[str, Sequence[LossCurve | CurveInvalid]]) -> Iterator[LossVerdict]:
    """The verdicts on the recipes of one cell.

    An invalid file refuses the whole recipe that it is named after, and every recipe where it is BF16's.
    """
    curves = {recipe: [run for run in of if isinstance(run, LossCurve)] for recipe, of in runs.items()}
    fp8 = [curve for recipe, of in curves.items() if recipe != REFERENCE for curve in of]
    for recipe in sorted(runs.keys() - {REFERENCE}) or [""]:
        lost = [str(run) for one in (REFERENCE, recipe) for run in runs.get(one, ()) if isinstance(run, CurveInvalid)]
        if not recipe:
            lost.append(f"there are curves of {REFERENCE} alone. Next step: train the FP8 recipes too")
        if lost:
            yield LossVerdict(of=cell, recipe=recipe, outcome=LossOutcome.REFUSED, refusals=tuple(lost))
        else:
            yield decide_loss(curves.get(REFERENCE, []), curves[recipe], fp8).model_copy(update={"of": cell})


def decide_loss(reference: Curves, candidate: Curves, fellows: Curves = ()) -> LossVerdict:
    """Decide on one FP8 recipe.

    Args:
        reference: BF16, at least three seeds.
        candidate: the recipe, with the same seeds, data and number of planned steps.
        fellows: FP8 runs of the same model, of any recipe: layers that cast there must cast here.

    Returns:
        `REFUSED` with the reasons where the curves cannot be compared, or BF16 is damaged or none; `FAIL` where any
        check is out of its bound; else `PASS`. It never raises for what is in a curve.
    """
    recipe = next((curve.recipe for curve in candidate), "")
    if refusals := tuple(find_refusals(reference, candidate)):
        return LossVerdict(recipe=recipe, outcome=LossOutcome.REFUSED, refusals=refusals)
    pairs = pair_by_seed(reference, candidate)
    steps = tuple(_check_steps(pair[side]) for side in (0, 1) for pair in pairs)
    if not all(check.passed for check in steps):
        return LossVerdict(recipe=recipe, outcome=LossOutcome.FAIL, checks=steps)
    bars, window = set_bars(pairs), pairs[0][0].planned // 10
    held = [check for _, fp8 in pairs for check in check_casts(fp8, [*candidate, *fellows])]
    curves = chain(_check_long_gaps(pairs, bars), _check_scales(pairs, bars.factor), _check_norms(pairs, bars.factor))
    checks = (*steps, *curves, *held)
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
    gap = smooth(_subtract(fp8.losses, bf16.losses), window)
    return SeedSeries(seed=bf16.seed, steps=bf16.steps[window - 1 :], reference=smooth(bf16.losses, window), gap=gap)


# --- Refusals: each is a sentence that ends with the next step. ---


def find_refusals(reference: Curves, candidate: Curves) -> Iterator[str]:
    """Why these curves allow no verdict; nothing if they do."""
    has, got = (sorted(curve.seed for curve in curves) for curves in (reference, candidate))
    if len(has) < LEAST_SEEDS:
        yield f"the reference has {len(has)} of at least {LEAST_SEEDS} seeds. Next step: train more of {REFERENCE}"
    if has != got:
        yield f"the reference has the seeds {has}, the candidate {got}. Next step: train both with the same seeds"
    elif has:
        yield from _find_wrong_pairs(reference, candidate)
    if unknown := sorted({curve.recipe for curve in candidate} - CASTS.keys() - {REFERENCE}):
        yield f"the recipe {unknown[0]!r} is unknown. Next step: give curves of one of {', '.join(CASTS)}"
    for curve in reference:
        if damage := find_damage(curve):
            yield f"{_name(curve)} is damaged: {'; '.join(damage)}. Next step: train it again"
        elif why := _find_no_learning(curve):
            yield f"{_name(curve)} is not a reference: {why}. Next step: fix the training in {REFERENCE} first"
        if curve.quantizers or curve.histories:
            yield f"{_name(curve)} trained in low precision. Next step: train it outside of every FP8 scope"
    curves = (*reference, *candidate)
    for what in MADE_WITH:
        values = sorted({curve.made_with.get(what, "") for curve in curves})
        if len(values) > 1 or "" in values:
            listed = " and ".join(value or "none" for value in values)
            yield f"the runs record as their {what}: {listed}. Next step: train all of them in one place"


def find_damage(curve: LossCurve) -> tuple[str, ...]:
    """What is wrong with the record of one run: steps missing, repeated or out of order, numbers not finite."""
    found = []
    if curve.steps != tuple(range(curve.planned)):
        found.append(
            f"it has {len(curve.steps)} of {curve.planned} steps, or a step is missing, repeated or out of order"
        )
    norms = {"gradient norm": curve.gradient_norms}
    norms |= {f"gradient norm of {part}": values for part, values in curve.part_norms.items()}
    losses = {"loss": curve.losses} | {f"loss of {part}": values for part, values in curve.part_losses.items()}
    for name, values in (losses | norms).items():
        odd = [step for step, value in zip(curve.steps, values, strict=False) if not math.isfinite(value)]
        if odd:
            found.append(f"the {name} of {len(odd)} steps is not finite; step {odd[0]} is the first of them")
        if (name in norms or name == "loss") and any(value < 0 for value in values):
            found.append(f"a {name} is below 0")
    return tuple(found)


def _find_wrong_pairs(reference: Curves, candidate: Curves) -> Iterator[str]:
    """Runs of different lengths or data, and one run under two names: two seeds or recipes differ from step 0 on."""
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
    for one, other in pairs:
        same = sum(abs(a - b) <= SAME * abs(a) for a, b in zip(one.losses, other.losses, strict=False))
        if same > one.planned // 2:
            yield (
                f"{_name(one)} and {_name(other)} have the same loss in {same} steps. Likely cause: FP8 never ran "
                "there, the weights were not seeded, or a curve was copied. Next step: look at the quantizers that "
                "the recipe probe observed, and train each of them"
            )


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


@dataclass(frozen=True)
class Bars:
    """What the smoothed gap of one seed may be, nats.

    Attributes:
        factor: how many deviations between seeds the farthest of them may be off.
        spread: the largest deviation between BF16 seeds in the second half.
        settled, early: bars of the second and the first half.
        later: bar of the first half after the first tenth of the run.
        tail: bar of the mean over all seeds.
    """

    factor: float
    spread: float
    settled: float
    early: float
    later: float
    tail: float


def set_bars(pairs: Pairs) -> Bars:
    """The bars that the BF16 runs give."""
    planned, seeds = pairs[0][0].planned, len(pairs)
    window, half = planned // 10, planned // 2
    smoothed = [smooth(bf16.losses, window) for bf16, _ in pairs]
    steps = slice(half, None), slice(0, half), slice(window, half)
    spread, early, later = (spread_of_seeds([curve[windows] for curve in smoothed]) for windows in steps)
    one, farthest = _STUDENT[max(number for number in _STUDENT if number <= max(seeds, 3))]
    factor = farthest * math.sqrt(2)
    return Bars(
        factor, spread,
        settled=min(CAP, factor * spread),
        early=min(CAP, max(factor * early, factor * spread)),
        later=min(CAP, factor * max(spread, later)),
        tail=min(CAP, one * math.sqrt(2) * spread) / math.sqrt(seeds),
    )  # fmt: skip


def smooth(values: Sequence[float], window: int) -> tuple[float, ...]:
    """Means over each `window` values in a row: `len(values) - window + 1` of them."""
    sums = (0.0, *accumulate(values))
    return tuple((sums[end] - sums[end - window]) / window for end in range(window, len(sums)))


def _subtract(values: Sequence[float], from_them: Sequence[float]) -> tuple[float, ...]:
    return tuple(a - b for a, b in zip(values, from_them, strict=True))


def find_noise(gaps: Sequence[float]) -> float:
    """What a step is off by for itself: root mean square of differences of neighbours, over the root of 2."""
    squares = [(after - before) * (after - before) / 2 for before, after in pairwise(gaps)]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def spread_of_seeds(curves: Sequence[Sequence[float]]) -> float:
    """The largest sample standard deviation from seed to seed over the windows of a stretch; NaN where one is NaN."""
    return _largest([sample_deviation(column) for column in zip(*curves, strict=True)])[0]


def sample_deviation(values: Sequence[float]) -> float:
    """The sample standard deviation of two values or more; infinite where it overflows, where `statistics` raises."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) * (value - mean) for value in values) / (len(values) - 1))


def to_json(value: float) -> float | None:
    """The value as JSON can have it: finite losses may have sums that are not."""
    return value if math.isfinite(value) else None


def _largest(values: Sequence[float]) -> tuple[float, int]:
    """The largest size among values and its place; NaN at place 0 where one of them is not a number."""
    sizes = [abs(value) for value in values]
    return (math.nan, 0) if any(map(math.isnan, sizes)) else (max(sizes), sizes.index(max(sizes)))


# --- Gaps. ---


@dataclass(frozen=True)
class _Extreme:
    """The largest size in one stretch, and what it may be; `where` says of what, in which seed and steps."""

    size: float
    bar: float
    where: str

    @property
    def excess(self) -> float:
        """How many bars it is; what is not a number is infinitely many."""
        if math.isnan(self.size) or math.isnan(self.bar):
            return math.inf
        return self.size / self.bar if self.bar else math.inf if self.size else 0.0


def _make_check(name: str, seen: Iterable[_Extreme], derivation: str) -> Check:
    """Of the one that is off by most of its bar; a number that is not finite becomes None, as in JSON."""
    worst = max(seen, key=lambda one: one.excess)
    passed = worst.size <= worst.bar  # a NaN is not
    part = Part("size", to_json(worst.size), to_json(worst.bar), passed, derivation)
    return Check(name, passed, (part,), worst.where)


def _check_long_gaps(pairs: Pairs, bars: Bars) -> Iterator[Check]:
    planned = pairs[0][0].planned
    window, half = planned // 10, planned // 2
    gaps = {bf16.seed: _subtract(fp8.losses, bf16.losses) for bf16, fp8 in pairs}
    said = f"Student's t of {len(pairs)} seeds x sqrt(2) x the largest spread of {REFERENCE} there"

    def look(name: str, *stretches: tuple[int, int, float]) -> Iterator[Check]:
        for seed, gap in gaps.items():
            seen = []
            for start, end, bar in stretches:
                size, place = _largest(smooth(gap, window)[start:end])
                where = f"largest in the window that ends at step {start + place + window - 1}"
                seen.append(_Extreme(size, bar, where))
            yield _make_check(f"{name}.seed{seed}", seen, f"{said}; {CAP} at most")

    yield from look("gap.settled", (half, planned, bars.settled))
    start = planned - planned // 5
    bias = sum(sum(gap[start:]) for gap in gaps.values()) / (len(gaps) * (planned - start))
    where = f"{bias:+.4f} nats over steps {start} and later"
    yield _make_check("gap.tail", [_Extreme(abs(bias), bars.tail, where)], f"{said}, over sqrt(seeds)")
    yield from look("gap.learning", (0, half, bars.early), (window, half, bars.later))


def _check_scales(pairs: Pairs, factor: float) -> Iterator[Check]:
    """The whole loss, its parts and the noise, over windows of every length."""
    planned = pairs[0][0].planned
    window, half = planned // 10, planned // 2
    first, second, learning = slice(0, half), slice(half, planned), slice(window, half)
    lengths = [*(2**power for power in range(window.bit_length()) if 2**power < window), window]
    said = f"{factor:.3g} x the largest spread of {REFERENCE} over as many steps, or {GROWTH:g} x their largest gap"
    find = partial(_find_gaps, lengths=lengths, factor=factor)
    losses = _take(pairs, lambda curve: curve.losses)
    for name, steps, beside, cap in (
        # In the first tenth a delay of few steps is more than the cap for as long; `gap.learning` is held to it there.
        ("start", slice(0, window), first, math.inf),
        ("learning", learning, first, CAP),
        ("settled", second, second, CAP),
    ):
        seen = find("loss", losses, (steps, beside), cap, long=False)  # the long window is that of `gap.settled`
        yield _make_check(f"gap.short.{name}", seen, f"{said}; at most {CAP} x sqrt({window} / steps of the window)")
    yield _check_noise("gap.noise.learning", learning, losses, window)
    yield _check_noise("gap.noise.settled", second, losses, window)
    norms = _take(pairs, lambda curve: [math.log(norm) if norm > 0 else math.nan for norm in curve.gradient_norms])
    bursts: list[_Extreme] = []
    for name, steps in (("learning", slice(planned // 20, half)), ("settled", second)):
        yield _check_noise(f"gradient_norm.noise.{name}", steps, norms, window, LATER)
        bursts += find("gradient norm", norms, (steps, steps), NORM_CAP, LATER)
    yield _make_check("gradient_norm.short", bursts, f"{said}, as logarithms; {LATER:.3g} at least")
    parts, lacking = _take_parts(pairs, "part_loss", lambda curve: curve.part_losses)
    yield from lacking
    for name, steps, cap in (("learning", first, math.inf), ("settled", second, CAP * len(parts))):
        if every := [one for part, own in parts.items() for one in find(part, own, (steps, steps), cap)]:
            yield _make_check(f"part_loss.{name}", every, f"{said}; of {len(parts)} parts")


def _take(pairs: Pairs, values: Callable[[LossCurve], Sequence[float]]) -> Series:
    return {bf16.seed: (values(bf16), values(fp8)) for bf16, fp8 in pairs}


def _take_parts(
    pairs: Pairs, name: str, table: Callable[[LossCurve], Mapping[str, Sequence[float]]]
) -> tuple[dict[str, Series], list[Check]]:
    """Each part that the runs recorded; or the check that fails where not every run recorded the same ones."""
    records = [table(curve) for pair in pairs for curve in pair]
    parts = sorted({part for record in records for part in record})
    if lacking := [part for part in parts if any(part not in record for record in records)]:
        return {}, [Check(f"{name}.recorded", False, detail=f"not every run recorded {', '.join(lacking)}")]
    return {part: {bf16.seed: (table(bf16)[part], table(fp8)[part]) for bf16, fp8 in pairs} for part in parts}, []


def _find_gaps(
    what: str, series: Series, at: tuple[slice, slice], cap: float, least: float = 0.0, *,
    lengths: Sequence[int], factor: float, long: bool = True,
) -> Iterator[_Extreme]:  # fmt: skip
    """The largest gap of each length of window in each seed.

    Args:
        at: steps that are looked at, and those of BF16 that the bar comes from.
        cap, least: what the bar of the longest window may be.
        long: whether the longest window is looked at.
    """
    steps, beside = at
    for length in lengths if long else lengths[:-1]:
        references = [smooth(bf16[beside], length) for bf16, _ in series.values()]
        # Single steps have long tails, which Student's t knows nothing of: many seeds make a factor so small that the
        # next spike of a healthy run would be beyond it. Two of BF16 that were seen so far apart are a fact.
        apart = max(max(column) - min(column) for column in zip(*references, strict=True))
        spread = max(factor * spread_of_seeds(references), GROWTH * apart)
        most = cap * math.sqrt(lengths[-1] / length)
        bar = spread if math.isnan(spread) else min(most, max(least, spread))
        for seed, (bf16, fp8) in series.items():
            size, place = _largest(smooth(_subtract(fp8[steps], bf16[steps]), length))
            end = steps.start + place + length - 1
            yield _Extreme(size, bar, f"{what}, seed {seed}, in the mean of {length} steps that ends at step {end}")


def _check_noise(name: str, chosen: slice, series: Series, window: int, least: float = 0.0) -> Check:
    references = [bf16[chosen] for bf16, _ in series.values()]
    apart = max(find_noise(_subtract(one, other)) for one, other in combinations(references, 2))
    # Seeds that differ smoothly say nothing of steps: what windows of them are apart by may come from independent steps
    # as well, whose noise is larger by the root of the window.
    spread = spread_of_seeds([smooth(one, window) for one in references])
    bar = max(GROWTH * apart, spread * math.sqrt(window), least)
    steps = f", steps {chosen.start} to {chosen.stop - 1}"
    seen = [
        _Extreme(find_noise(_subtract(fp8[chosen], bf16[chosen])), bar, f"seed {seed}{steps}")
        for seed, (bf16, fp8) in series.items()
    ]
    return _make_check(name, seen, f"{GROWTH:g} x the noise between two seeds of {REFERENCE}, or their spread")


def _check_norms(pairs: Pairs, factor: float) -> Iterator[Check]:
    planned = pairs[0][0].planned
    matched = planned // 20  # end of the first part, where weights are still nearly equal
    first, begin = range(matched), range(max(matched // 10, FEWEST))
    tenths = [range(a, b) for a, b in pairwise(matched + (planned - matched) * tenth // 10 for tenth in range(11))]
    # As long as the first one, each beginning in the middle of the one before; the last one ends with the run.
    starts = (*range(matched, planned - matched, max(matched // 2, 1)), planned - matched)
    short = [range(a, a + matched) for a in starts]
    spread = f"{factor:.3g} x the spread of {REFERENCE} there, log 2 at most"
    halfway = f"halfway between equal and scaled by {SMALLEST_SCALING}, as a logarithm"
    whole = {"all": _take(pairs, lambda curve: curve.gradient_norms)}
    parts, lacking = _take_parts(pairs, "part_norm", lambda curve: curve.part_norms)
    yield from lacking
    for name, of, stretches, times, least, most, why in (
        ("gradient_norm.matched", whole, [first], 0.0, MATCHED, MATCHED, halfway),
        ("gradient_norm.later", whole, tenths, factor, LATER, NORM_CAP, f"{spread}, {LATER:.3g} at least"),
        ("part_norm.first", parts, [begin], 0.0, LATER, LATER, f"{LATER:.3g}, twice the smallest scaling"),
        ("part_norm.matched", parts, [first], factor, MATCHED, NORM_CAP, f"{spread}, {MATCHED:.3g} at least"),
        ("part_norm.later", parts, short, 0.0, VANISHING, VANISHING, "a sixteenth to 16 times, as a logarithm"),
    ):
        if of:
            flushed = name == "part_norm.first"  # delayed scaling flushes gradients after a spike: others see that
            seen = [
                _median(part, norms, stretch, times, least, most, skip_zeros=flushed)
                for part, norms in of.items()
                for stretch in stretches
            ]
            yield _make_check(name, seen, why)


def _median(
    part: str, norms: Series, stretch: range, factor: float, least: float, most: float, *, skip_zeros: bool
) -> _Extreme:
    """The median of the logarithm of FP8 over BF16 in the seed that is farthest off."""
    chosen, medians = slice(stretch.start, stretch.stop), {}
    for seed, (bf16, fp8) in norms.items():
        pairs = zip(fp8[chosen], bf16[chosen], strict=True)
        ratios = [_log_ratio(above, below) for above, below in pairs if above != 0 or not skip_zeros]
        medians[seed] = statistics.median(ratios or [0.0])
    sizes = {seed: math.inf if math.isnan(median) else abs(median) for seed, median in medians.items()}
    seed = max(sizes, key=lambda one: sizes[one])
    above_0 = ([norm for norm in bf16[chosen] if norm > 0] or [1.0] for bf16, _ in norms.values())
    logs = [statistics.median(map(math.log, values)) for values in above_0]
    times = f"x {math.exp(min(medians[seed], 700)):.4f}"
    where = f"FP8 over {REFERENCE}, {part}, seed {seed}, steps {stretch.start} to {stretch.stop - 1}: {times}"
    return _Extreme(sizes[seed], min(most, max(least, factor * sample_deviation(logs))), where)


def _log_ratio(above: float, below: float) -> float:
    """Two zeros are equal, one zero is infinitely far off."""
    if above == below:
        return 0.0
    if 0 in (above, below):
        return math.inf if below == 0 else -math.inf
    return math.log(above) - math.log(below)
