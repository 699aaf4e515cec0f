"""The gap between FP8 and BF16 over stretches of every length: what a mean over a tenth of the run levels out.

A spike that recovers, a swing whose ups and downs cancel, a run that leaves in its last steps, a noise that has grown:
each is far beyond what two seeds of BF16 do over as many steps, and nothing of it is left in a long mean. So gaps are
smoothed over 1, 2, 4, ... steps up to a tenth of the run, and held to the same as the long one: how far two BF16 seeds
may lie apart over as many steps, by chance, where they differ most.

- `gap.short`: of the whole loss, at the start, in the rest of the first half, and in the second half. The cap of a
  window is that of the long one times the square root of how many of it the long one holds: gaps of so much in each of
  them, by chance up or down, make one of the cap in the long one.
- `gap.noise`: from step to step, beside the noisiest difference of two BF16 seeds, which have nothing in common but the
  data; twice that at most, as nothing may double that a gradient may not. It comes from differences of neighbours, so
  that nothing slow is in it.
- `gradient_norm.short`: the same of the gradients of the whole, once weights have drifted apart, in each half;
  `loss_norms` looks at medians, which a burst of few steps leaves alone. `gradient_norm.noise`: spikes of single steps
  that come again, of which none is beyond what one step may be.
- `part_loss`: the loss of each part of the data, in the same way. A part moves the whole by its share, so that its cap
  is that of the whole times the number of parts; while it is learned, seeds alone are the bar.

Nothing is computed from the candidate but what is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from typing import Final

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.evidence.receipt import Check, Part

from .loss_norms import CAP as NORM_CAP
from .loss_norms import LATER
from .loss_statistics import CAP, spread_of_seeds, subtract

GROWTH: Final = 2.0  # of what two seeds of BF16 were seen to differ by
Pairs = Sequence[tuple[LossCurve, LossCurve]]
Series = Mapping[int, tuple[Sequence[float], Sequence[float]]]  # seed -> BF16 and FP8


@dataclass(frozen=True)
class Stretch:
    """Some steps in a row that are judged together.

    Attributes:
        steps: those.
        beside: steps of BF16 whose spread is the bar.
        cap: of a window of a tenth of the run, in nats, whatever seeds do.
        least: what the bar is at least.
    """

    name: str
    steps: slice
    beside: slice
    cap: float = CAP
    least: float = 0.0


@dataclass(frozen=True)
class _Seen:
    """The largest gap of one length of window in one stretch, and what it may be."""

    what: str
    window: int
    end: int
    seed: int
    size: float
    bar: float

    @property
    def excess(self) -> float:
        """How many bars it is; what is no number is infinitely many."""
        if math.isnan(self.size) or math.isnan(self.bar):
            return math.inf
        return self.size / self.bar if self.bar else math.inf if self.size else 0.0


def check_scales(pairs: Pairs, planned: int, factor: float) -> Iterator[Check]:
    """The checks of the whole loss and of its parts, over windows of every length.

    Args:
        pairs: BF16 and FP8 of each seed, undamaged, of `planned` steps each.
        planned: steps of each.
        factor: how many deviations between seeds two runs that differ by chance may be apart.
    """
    window, half = planned // 10, planned // 2
    first = slice(0, half)
    learning, settled = Stretch("learning", slice(window, half), first), _alike("settled", slice(half, planned))
    # In the first tenth a delay of few steps is more than the cap for as long; the long window is held to it there too.
    start = Stretch("start", slice(0, window), first, math.inf)
    whole = {bf16.seed: (bf16.losses, fp8.losses) for bf16, fp8 in pairs}
    for stretch in (start, learning, settled):
        seen = _see("loss", whole, stretch, lengths(window)[:-1], factor, window)  # the long one is `gap.settled`
        cap = f"; at most {stretch.cap} x the root of {window} over them" if math.isfinite(stretch.cap) else ""
        yield _tell(f"gap.short.{stretch.name}", seen, f"{_say(factor)}{cap}")
    for stretch in (learning, settled):
        yield _check_noise(f"gap.noise.{stretch.name}", stretch.steps, whole, window)
    norms = {bf16.seed: (_logs(bf16), _logs(fp8)) for bf16, fp8 in pairs}
    halves = {"learning": slice(planned // 20, half), "settled": slice(half, planned)}
    for name, steps in halves.items():
        yield _check_noise(f"gradient_norm.noise.{name}", steps, norms, window, LATER)
    bursts = [
        one
        for steps in halves.values()
        for one in _see("gradient norm", norms, _alike("", steps, NORM_CAP, LATER), lengths(window), factor, window)
    ]
    said = f"{_say(factor)}, as logarithms; {LATER:.3g} at least, and log 2 x the root of {window} over them at most"
    yield _tell("gradient_norm.short", bursts, said)
    yield from _check_parts(pairs, (_alike("learning", first, math.inf), settled), factor, window)


def _logs(curve: LossCurve) -> tuple[float, ...]:
    """Of the gradient norms; of 0 it is no number, which is within no bar."""
    return tuple(math.log(norm) if norm > 0 else math.nan for norm in curve.gradient_norms)


def _alike(name: str, steps: slice, cap: float = CAP, least: float = 0.0) -> Stretch:
    return Stretch(name, steps, steps, cap, least)


def lengths(longest: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the longest."""
    powers = [2**power for power in range(max(longest, 1).bit_length())]
    return tuple(dict.fromkeys((*(one for one in powers if one < longest), max(longest, 1))))


def means(values: Sequence[float], window: int) -> tuple[float, ...]:
    """As `smooth`, in one pass: for bars and sizes that no picture shows."""
    sums = (0.0, *accumulate(values))
    return tuple((sums[end] - sums[end - window]) / window for end in range(window, len(sums)))


def _check_parts(pairs: Pairs, stretches: Sequence[Stretch], factor: float, window: int) -> Iterator[Check]:
    curves = [curve for pair in pairs for curve in pair]
    parts = sorted({part for curve in curves for part in curve.part_losses})
    if lacking := [part for part in parts if any(part not in curve.part_losses for curve in curves)]:
        yield Check("part_loss.recorded", False, detail=f"not every run recorded {', '.join(lacking)}")
        return
    if not parts:
        return
    for stretch in stretches:
        own = replace(stretch, cap=stretch.cap * len(parts))
        seen: list[_Seen] = []
        for part in parts:
            series = {bf16.seed: (bf16.part_losses[part], fp8.part_losses[part]) for bf16, fp8 in pairs}
            seen += _see(part, series, own, lengths(window), factor, window)
        cap = f"; at most {own.cap:g} x the root of {window} over them" if math.isfinite(own.cap) else ""
        yield _tell(f"part_loss.{stretch.name}", seen, f"{_say(factor)}{cap}; of {len(parts)} parts")


def _see(what: str, series: Series, at: Stretch, windows: Sequence[int], factor: float, window: int) -> Iterator[_Seen]:
    for length in windows:
        cap = at.cap * math.sqrt(window / length)
        references = [means(bf16[at.beside], length) for bf16, _ in series.values()]
        # Single steps have long tails, which Student's t knows nothing of: many seeds make a factor so small that the
        # next spike of a healthy run would be beyond it. Two of BF16 that were seen so far apart are a fact.
        apart = max(max(column) - min(column) for column in zip(*references, strict=True))
        spread = max(factor * spread_of_seeds(references), GROWTH * apart)
        bar = spread if math.isnan(spread) else min(cap, max(at.least, spread))
        for seed, (bf16, fp8) in series.items():
            gaps = [abs(gap) for gap in means(subtract(fp8[at.steps], bf16[at.steps]), length)]
            size = math.nan if any(map(math.isnan, gaps)) else max(gaps)
            place = gaps.index(size) if size in gaps else 0
            yield _Seen(what, length, at.steps.start + place + length - 1, seed, size, bar)


def _check_noise(name: str, chosen: slice, series: Series, window: int, least: float = 0.0) -> Check:
    references = [bf16[chosen] for bf16, _ in series.values()]
    apart = max(_noise(subtract(one, other)) for one, other in combinations(references, 2))
    # Seeds that differ smoothly say nothing of steps: what windows of them are apart by may come from independent steps
    # as well, whose noise is larger by the root of the window.
    spread = spread_of_seeds([means(one, window) for one in references])
    bar = max(GROWTH * apart, spread * math.sqrt(window), least)
    noises = {seed: _noise(subtract(fp8[chosen], bf16[chosen])) for seed, (bf16, fp8) in series.items()}
    seed = max(noises, key=lambda one: math.inf if math.isnan(noises[one]) else noises[one])
    passed = noises[seed] <= bar
    said = (
        f"{GROWTH:g} x the noise of the difference of two seeds of bf16, or their spread over {window} "
        f"steps x the root of {window}{f'; {least:.3g} at least, of logarithms' if least else ''}"
    )
    part = Part("size", _finite(noises[seed]), _finite(bar), passed, said)
    return Check(name, passed, (part,), f"seed {seed}, steps {chosen.start} to {chosen.stop - 1}")


def _noise(gaps: Sequence[float]) -> float:
    """What a step is off by for itself: root mean square of differences of neighbours, over the root of 2."""
    squares = [(after - before) * (after - before) / 2 for before, after in pairwise(gaps)]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _tell(name: str, seen: Iterator[_Seen] | Sequence[_Seen], derivation: str) -> Check:
    """The one that is off by most of its bar."""
    worst = max(seen, key=lambda one: one.excess)
    passed = worst.size <= worst.bar  # a NaN is not
    span = f"in the mean of {worst.window} steps, of which the last is" if worst.window > 1 else "at"
    detail = f"{worst.what}, seed {worst.seed}, {span} step {worst.end}"
    return Check(name, passed, (Part("size", _finite(worst.size), _finite(worst.bar), passed, derivation),), detail)


def _say(factor: float) -> str:
    return (
        f"{factor:.3g} (as for the long windows) x the largest spread of bf16 over as many steps there, or {GROWTH:g} "
        "x the largest difference of two of its seeds"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
