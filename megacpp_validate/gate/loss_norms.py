"""Gradient norms of FP8 runs beside those of their BF16 twins: what Adam hides from the loss shows here.

Medians over steps, of the seed that is farthest off: one spike, or the first step of delayed scaling, is not what is
looked for. A norm of 0 beside one that is not is infinitely far off.

- `gradient_norm.matched`: all gradients together over the first twentieth, where FP8 and BF16 still have nearly the
  same weights, so that the ratio is that of the arithmetic: a scaled loss, however little.
- `gradient_norm.later`: the same over each tenth of the rest, where weights have drifted apart as seeds do.
- `part_norm.first`: each part of the model over the first steps, whose weights are the same but for a few updates: a
  scale of one layer that is off, which Adam hides from the loss, and the norm of all if it is small.
- `part_norm.matched`: each part over the first twentieth: a layer that gets no gradients, letters whose
  gradients are flushed, which weigh nothing in the norm of all.
- `part_norm.later`: parts that vanish or blow up later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.evidence.receipt import Check, Part

from .loss_pairs import REFERENCE
from .loss_statistics import log_ratios, sample_deviation

SMALLEST_SCALING: Final = 1.03
MATCHED: Final = math.log(SMALLEST_SCALING) / 2
LATER: Final = 2 * math.log(SMALLEST_SCALING)
CAP: Final = math.log(2)  # of those bars: whatever halves or doubles a gradient is seen, however seeds differ
# Healthy runs of the same seed wander apart: by 3.1 at most in a part, on an H200 on 2026-11-21. What is looked for is
# off by 2^10 and more, or 0.
VANISHING: Final = math.log(16)
FEWEST: Final = 5  # steps of a median that one spike and the first step of delayed scaling leave alone

Pairs = Sequence[tuple[LossCurve, LossCurve]]
Norms = Mapping[int, tuple[Sequence[float], Sequence[float]]]  # seed -> those of BF16 and of FP8


@dataclass(frozen=True)
class _Seen:
    """The median of one stretch of one part in the seed that is farthest off, and what it may be."""

    part: str
    stretch: range
    seed: int
    median: float
    bar: float

    @property
    def excess(self) -> float:
        """How many bars it is off."""
        return _size(self.median) / self.bar


def check_norms(pairs: Pairs, planned: int, matched: int, factor: float) -> Iterator[Check]:
    """The checks of norms.

    Args:
        pairs: BF16 and FP8 of each seed, undamaged.
        planned: steps of each.
        matched: end of the stretch where weights are nearly equal.
        factor: how many deviations between seeds two runs that differ by chance may be apart.
    """
    first = range(matched)
    rest = [range(a, b) for a, b in pairwise(matched + (planned - matched) * tenth // 10 for tenth in range(11))]
    # As long as the first one, each beginning in the middle of the one before; the last one ends with the run.
    half = max(matched // 2, 1)
    short = [range(a, a + matched) for a in (*range(matched, planned - matched, half), planned - matched)]
    norms = {bf16.seed: (bf16.gradient_norms, fp8.gradient_norms) for bf16, fp8 in pairs}
    all_of_it = _see("all", norms, first, 0.0, MATCHED, MATCHED)
    yield _tell(
        "gradient_norm.matched", [all_of_it], f"halfway between equal and scaled by {SMALLEST_SCALING}, as a logarithm"
    )
    said = f"{factor:.3g} x the spread of {REFERENCE} there"
    later = [_see("all", norms, stretch, factor, LATER, CAP) for stretch in rest]
    least = f"{LATER:.3g} (twice the smallest scaling looked for)"
    yield _tell("gradient_norm.later", later, f"{said}, {least} at least and log 2 at most")
    parts = sorted({part for pair in pairs for curve in pair for part in curve.part_norms})
    if not parts:
        return
    if lacking := sorted({part for part in parts for pair in pairs for c in pair if part not in c.part_norms}):
        yield Check("part_norm.recorded", False, detail=f"not every run recorded {', '.join(lacking)}")
        return
    start, early, late = [], [], []
    for part in parts:
        own = {bf16.seed: (bf16.part_norms[part], fp8.part_norms[part]) for bf16, fp8 in pairs}
        begin = range(max(matched // 10, FEWEST))
        start.append(_see(part, _unflushed(own, begin), begin, 0.0, LATER, LATER))
        early.append(_see(part, own, first, factor, MATCHED, CAP))
        late += [_see(part, own, stretch, 0.0, VANISHING, VANISHING) for stretch in short]
    yield _tell("part_norm.first", start, f"{LATER:.3g}, twice the smallest scaling looked for; of {len(parts)} parts")
    least = f"{MATCHED:.3g} (half the smallest scaling looked for)"
    yield _tell("part_norm.matched", early, f"{said}, {least} at least and log 2 at most; of {len(parts)} parts")
    yield _tell("part_norm.later", late, f"a sixteenth and 16 times, as a logarithm: what vanishes; {len(parts)} parts")


def _see(part: str, norms: Norms, stretch: range, factor: float, least: float, most: float) -> _Seen:
    chosen = slice(stretch.start, stretch.stop)
    medians = {seed: statistics.median(log_ratios(fp8[chosen], bf16[chosen])) for seed, (bf16, fp8) in norms.items()}
    seed = max(medians, key=lambda one: _size(medians[one]))
    logs = [
        statistics.median([math.log(norm) for norm in bf16[chosen] if norm > 0] or [0.0]) for bf16, _ in norms.values()
    ]
    return _Seen(part, stretch, seed, medians[seed], min(most, max(least, factor * sample_deviation(logs))))


def _unflushed(norms: Norms, stretch: range) -> Norms:
    """Without steps whose gradients FP8 flushed, as delayed scaling does after a spike: 0 is for the others to see."""
    kept = {}
    for seed, (bf16, fp8) in norms.items():
        rows = [(bf16[step], fp8[step]) for step in stretch if fp8[step] != 0.0] or [(1.0, 1.0)]
        kept[seed] = tuple(one for one, _ in rows), tuple(other for _, other in rows)
    return kept


def _size(median: float) -> float:
    """How far off; what is no number is infinitely far."""
    return math.inf if math.isnan(median) else abs(median)


def _tell(name: str, seen: Sequence[_Seen], derivation: str) -> Check:
    """The one that is off by most of its bar."""
    worst = max(seen, key=lambda one: one.excess)
    size = _size(worst.median)
    passed = size <= worst.bar
    where = f"steps {worst.stretch.start} to {worst.stretch.stop - 1}"
    times = f"{math.exp(min(worst.median, 700)):.4f}"
    detail = f"FP8 over {REFERENCE}, {worst.part}, seed {worst.seed}, median over {where}: x {times}"
    finite = size if math.isfinite(size) else None
    return Check(name, passed, (Part("size", finite, worst.bar, passed, derivation),), detail)
