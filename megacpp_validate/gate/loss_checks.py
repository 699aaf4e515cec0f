"""Gaps and gradient norms of FP8 runs beside those of their BF16 twins, over stretches of every length.

A spike that recovers, a swing whose ups and downs cancel, a run that leaves in its last steps, a noise that has grown:
each is far beyond what two seeds of BF16 do over as many steps, and nothing of it is left in a long mean. So gaps are
smoothed over 1, 2, 4, ... steps up to a tenth of the run.

- `gap.short`: of the whole loss. The cap of a window is that of the long one times the square root of how many of it
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

Nothing is computed from the candidate but what is judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final

from ..evidence.loss_curve import LossCurve
from ..evidence.receipt import Check, Part
from .loss_refusals import REFERENCE, Pairs
from .loss_statistics import CAP, find_largest, find_noise, sample_deviation, smooth_fast, spread_of_seeds, subtract

GROWTH: Final = 2.0  # of what two seeds of BF16 were seen to differ by
SMALLEST_SCALING: Final = 1.03
MATCHED: Final = math.log(SMALLEST_SCALING) / 2
LATER: Final = 2 * math.log(SMALLEST_SCALING)
NORM_CAP: Final = math.log(2)  # of those bars: whatever halves or doubles a gradient is seen, however seeds differ
# Healthy runs of the same seed wander apart: by 3.1 at most in a part, on an H200 on 2026-11-21. What is looked for is
# off by 2^10 and more, or 0.
VANISHING: Final = math.log(16)
FEWEST: Final = 5  # steps of a median that one spike and the first step of delayed scaling leave alone

Series = Mapping[int, tuple[Sequence[float], Sequence[float]]]  # seed -> values of BF16 and of FP8, a step each


@dataclass(frozen=True)
class Extreme:
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


def make_check(name: str, seen: Iterable[Extreme], derivation: str) -> Check:
    """Of the one that is off by most of its bar; a number that is not finite becomes None, as in JSON."""
    worst = max(seen, key=lambda one: one.excess)
    passed = worst.size <= worst.bar  # a NaN is not
    part = Part("size", to_json(worst.size), to_json(worst.bar), passed, derivation)
    return Check(name, passed, (part,), worst.where)


def to_json(value: float) -> float | None:
    """The value as JSON can have it: finite losses may have sums that are not."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class _Stretch:
    """Steps in a row that are judged together.

    Attributes:
        beside: steps of BF16 whose spread is the bar; those themselves without it.
        cap: of a window of a tenth of the run, whatever seeds do.
        least: what the bar is at least.
    """

    name: str
    steps: slice
    beside: slice | None = None
    cap: float = CAP
    least: float = 0.0


def check_scales(pairs: Pairs, planned: int, factor: float) -> Iterator[Check]:
    """The checks of the whole loss, of its parts and of the noise, over windows of every length.

    Args:
        pairs: BF16 and FP8 of each seed, undamaged, of `planned` steps each.
        factor: how many deviations between seeds two runs that differ by chance may be apart.
    """
    window, half = planned // 10, planned // 2
    first, second = slice(0, half), slice(half, planned)
    lengths = [*(2**power for power in range(window.bit_length()) if 2**power < window), window]
    said = f"{factor:.3g} x the largest spread of {REFERENCE} over as many steps, or {GROWTH:g} x their largest gap"
    whole = _take(pairs, lambda curve: curve.losses)
    for at in (
        # In the first tenth a delay of few steps is more than the cap for as long; `gap.learning` is held to it there.
        _Stretch("start", slice(0, window), first, math.inf),
        _Stretch("learning", slice(window, half), first),
        _Stretch("settled", second),
    ):
        seen = _compare("loss", whole, at, lengths[:-1], factor, window)  # the long one is `gap.settled`
        yield make_check(f"gap.short.{at.name}", seen, f"{said}; {at.cap} x the root of {window} over them at most")
    yield _check_noise("gap.noise.learning", slice(window, half), whole, window)
    yield _check_noise("gap.noise.settled", second, whole, window)
    norms = _take(pairs, lambda curve: [math.log(norm) if norm > 0 else math.nan for norm in curve.gradient_norms])
    halves = {"learning": slice(planned // 20, half), "settled": second}
    for name, steps in halves.items():
        yield _check_noise(f"gradient_norm.noise.{name}", steps, norms, window, LATER)
    bursts = [
        one
        for steps in halves.values()
        for one in _compare("gradient norm", norms, _Stretch("", steps, None, NORM_CAP, LATER), lengths, factor, window)
    ]
    yield make_check("gradient_norm.short", bursts, f"{said}, as logarithms; {LATER:.3g} at least")
    parts, lacking = _list_parts(pairs, "part_losses")
    if lacking:
        yield Check("part_loss.recorded", False, detail=f"not every run recorded {', '.join(lacking)}")
    elif parts:
        for at in (
            _Stretch("learning", first, None, math.inf),
            _Stretch("settled", second, None, CAP * len(parts)),
        ):
            own = {part: _take_part(pairs, "part_losses", part) for part in parts}
            every = [one for part in parts for one in _compare(part, own[part], at, lengths, factor, window)]
            yield make_check(f"part_loss.{at.name}", every, f"{said}; of {len(parts)} parts")


def check_norms(pairs: Pairs, planned: int, factor: float) -> Iterator[Check]:
    """The checks of medians of norms; arguments as of `check_scales`."""
    matched = planned // 20  # end of the first part, where weights are still nearly equal
    first, begin = range(matched), range(max(matched // 10, FEWEST))
    tenths = [range(a, b) for a, b in pairwise(matched + (planned - matched) * tenth // 10 for tenth in range(11))]
    # As long as the first one, each beginning in the middle of the one before; the last one ends with the run.
    starts = (*range(matched, planned - matched, max(matched // 2, 1)), planned - matched)
    short = [range(a, a + matched) for a in starts]
    spread = f"{factor:.3g} x the spread of {REFERENCE} there, log 2 at most"
    norms = _take(pairs, lambda curve: curve.gradient_norms)
    halfway = f"halfway between equal and scaled by {SMALLEST_SCALING}, as a logarithm"
    yield make_check("gradient_norm.matched", [_median("all", norms, first, 0.0, MATCHED, MATCHED)], halfway)
    later = [_median("all", norms, stretch, factor, LATER, NORM_CAP) for stretch in tenths]
    yield make_check("gradient_norm.later", later, f"{spread}, {LATER:.3g} at least")
    parts, lacking = _list_parts(pairs, "part_norms")
    if lacking:
        yield Check("part_norm.recorded", False, detail=f"not every run recorded {', '.join(lacking)}")
    elif parts:
        own = {part: _take_part(pairs, "part_norms", part) for part in parts}
        start = [_median(part, _unflush(own[part], begin), begin, 0.0, LATER, LATER) for part in parts]
        yield make_check("part_norm.first", start, f"{LATER:.3g}, twice the smallest scaling; of {len(parts)} parts")
        early = [_median(part, own[part], first, factor, MATCHED, NORM_CAP) for part in parts]
        yield make_check("part_norm.matched", early, f"{spread}, {MATCHED:.3g} at least; of {len(parts)} parts")
        late = [_median(part, own[part], stretch, 0.0, VANISHING, VANISHING) for part in parts for stretch in short]
        yield make_check("part_norm.later", late, f"a sixteenth to 16 times, as a logarithm; of {len(parts)} parts")


def _take(pairs: Pairs, values: Callable[[LossCurve], Sequence[float]]) -> Series:
    return {bf16.seed: (values(bf16), values(fp8)) for bf16, fp8 in pairs}


def _take_part(pairs: Pairs, name: str, part: str) -> Series:
    return _take(pairs, lambda curve: getattr(curve, name)[part])


def _list_parts(pairs: Pairs, name: str) -> tuple[list[str], list[str]]:
    """Parts that a run recorded, and those that not every run did."""
    records = [getattr(curve, name) for pair in pairs for curve in pair]
    parts = sorted({part for record in records for part in record})
    return parts, [part for part in parts if any(part not in record for record in records)]


def _compare(
    what: str, series: Series, at: _Stretch, lengths: Sequence[int], factor: float, window: int
) -> Iterator[Extreme]:
    """The largest gap of each length of window in each seed."""
    for length in lengths:
        cap = at.cap * math.sqrt(window / length)
        references = [smooth_fast(bf16[at.beside or at.steps], length) for bf16, _ in series.values()]
        # Single steps have long tails, which Student's t knows nothing of: many seeds make a factor so small that the
        # next spike of a healthy run would be beyond it. Two of BF16 that were seen so far apart are a fact.
        apart = max(max(column) - min(column) for column in zip(*references, strict=True))
        spread = max(factor * spread_of_seeds(references), GROWTH * apart)
        bar = spread if math.isnan(spread) else min(cap, max(at.least, spread))
        for seed, (bf16, fp8) in series.items():
            size, place = find_largest(smooth_fast(subtract(fp8[at.steps], bf16[at.steps]), length))
            end = at.steps.start + place + length - 1
            yield Extreme(size, bar, f"{what}, seed {seed}, in the mean of {length} steps that ends at step {end}")


def _check_noise(name: str, chosen: slice, series: Series, window: int, least: float = 0.0) -> Check:
    references = [bf16[chosen] for bf16, _ in series.values()]
    apart = max(find_noise(subtract(one, other)) for one, other in combinations(references, 2))
    # Seeds that differ smoothly say nothing of steps: what windows of them are apart by may come from independent steps
    # as well, whose noise is larger by the root of the window.
    spread = spread_of_seeds([smooth_fast(one, window) for one in references])
    bar = max(GROWTH * apart, spread * math.sqrt(window), least)
    steps = f"steps {chosen.start} to {chosen.stop - 1}"
    seen = [
        Extreme(find_noise(subtract(fp8[chosen], bf16[chosen])), bar, f"seed {seed}, {steps}")
        for seed, (bf16, fp8) in series.items()
    ]
    return make_check(name, seen, f"{GROWTH:g} x the noise between two seeds of {REFERENCE}, or their spread")


def _median(part: str, norms: Series, stretch: range, factor: float, least: float, most: float) -> Extreme:
    """The median of the logarithm of FP8 over BF16 in the seed that is farthest off."""
    chosen = slice(stretch.start, stretch.stop)
    medians = {
        seed: statistics.median(map(_log_ratio, fp8[chosen], bf16[chosen])) for seed, (bf16, fp8) in norms.items()
    }
    sizes = {seed: math.inf if math.isnan(median) else abs(median) for seed, median in medians.items()}
    seed = max(sizes, key=lambda one: sizes[one])
    above_0 = ([norm for norm in bf16[chosen] if norm > 0] or [1.0] for bf16, _ in norms.values())
    logs = [statistics.median(map(math.log, values)) for values in above_0]
    times = f"x {math.exp(min(medians[seed], 700)):.4f}"
    where = f"FP8 over {REFERENCE}, {part}, seed {seed}, steps {stretch.start} to {stretch.stop - 1}: {times}"
    return Extreme(sizes[seed], min(most, max(least, factor * sample_deviation(logs))), where)


def _unflush(norms: Series, stretch: range) -> Series:
    """Without steps whose gradients FP8 flushed, as delayed scaling does after a spike: 0 is for the others to see."""
    kept = {}
    for seed, (bf16, fp8) in norms.items():
        rows = [(bf16[step], fp8[step]) for step in stretch if fp8[step] != 0.0] or [(1.0, 1.0)]
        kept[seed] = tuple(one for one, _ in rows), tuple(other for _, other in rows)
    return kept


def _log_ratio(above: float, below: float) -> float:
    """Two zeros are equal, one zero is infinitely far off."""
    if above == below:
        return 0.0
    if above == 0 or below == 0:
        return math.inf if below == 0 else -math.inf
    return math.log(above) - math.log(below)
