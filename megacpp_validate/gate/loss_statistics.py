"""The numbers that the loss gate looks at. Plain functions of finite series; none divides by what FP8 did.

Each is monotone: gaps that are scaled up never make it smaller. A t-test has not that property: one seed far off raises
the standard error, and with it the bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

CAP: Final = 0.01  # nats: what the smoothed loss of FP8 may be off by at most, however far seeds are apart
# Student's t, two-sided 95%, by degrees of freedom; beyond the last one the last one is taken, which is the larger bar.
_T_95: Final = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 15: 2.131, 20: 2.086}
_FEWEST_SEEDS: Final = 3
_PRECISION: Final = 1e-9


def smooth(values: Sequence[float], window: int) -> tuple[float, ...]:
    """Means over each `window` values in a row: `len(values) - window + 1` of them."""
    return tuple(sum(values[start : start + window]) / window for start in range(len(values) - window + 1))


def smooth_fast(values: Sequence[float], window: int) -> tuple[float, ...]:
    """As `smooth`, in one pass: for bars and sizes that no picture shows."""
    sums = (0.0, *accumulate(values))
    return tuple((sums[end] - sums[end - window]) / window for end in range(window, len(sums)))


def subtract(values: Sequence[float], from_them: Sequence[float]) -> tuple[float, ...]:
    """The differences, value by value."""
    return tuple(a - b for a, b in zip(values, from_them, strict=True))


def find_largest(values: Sequence[float]) -> tuple[float, int]:
    """The largest size among values and its place; NaN at place 0 where one of them is not a number."""
    sizes = [abs(value) for value in values]
    if any(map(math.isnan, sizes)):
        return math.nan, 0
    return max(sizes), sizes.index(max(sizes))


def find_noise(gaps: Sequence[float]) -> float:
    """What a step is off by for itself: root mean square of differences of neighbours, over the root of 2."""
    squares = [(after - before) * (after - before) / 2 for before, after in pairwise(gaps)]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def spread_of_seeds(curves: Sequence[Sequence[float]]) -> float:
    """The largest sample standard deviation from seed to seed over all windows of a stretch.

    A gap is held to this where it is largest, so it is compared with what seeds do where they differ most.

    Args:
        curves: the same stretch of each seed's smoothed loss.
    """
    variances = [_variance(column) for column in zip(*curves, strict=True)]
    return math.sqrt(max(variances)) if not any(map(math.isnan, variances)) else math.nan


def sample_deviation(values: Sequence[float]) -> float:
    """The sample standard deviation of two values or more; infinite where it overflows."""
    return math.sqrt(_variance(values))


def t_95(seeds: int) -> float:
    """How many sample standard deviations another seed may be off, at 95%, where `seeds` seeds gave that deviation."""
    return _T_95[max(freedom for freedom in _T_95 if freedom <= max(seeds - 1, 2))]


def t_of_largest(seeds: int) -> float:
    """How many deviations the farthest of `seeds` seeds may be off, where as many gave that deviation.

    Each seed that is looked at has a chance of its own to be beyond a bar: at 95% one of sixteen is, as a rule. So each
    is asked at 3 / `seeds` of those 5%, which keeps the chance of all of them at that of three (Bonferroni).

    Args:
        seeds: three or more; three have the bar of `t_95`.
    """
    if seeds <= _FEWEST_SEEDS:
        return t_95(seeds)
    beyond = 0.05 * _FEWEST_SEEDS / seeds
    low, high = 0.0, t_95(_FEWEST_SEEDS)  # of three seeds, beyond which no more of them lie
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - _within(middle, seeds - 1) > beyond else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """How likely Student's t of two or more degrees of freedom is between -t and t.

    M. Abramowitz and I. A. Stegun, Handbook of Mathematical Functions, 1964, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _variance(values: Sequence[float]) -> float:
    """The sample variance in plain floats: `statistics.variance` raises where it overflows, this is infinite."""
    mean = sum(values) / len(values)
    return sum((value - mean) * (value - mean) for value in values) / (len(values) - 1)
