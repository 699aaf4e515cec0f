"""The numbers that the loss gate looks at. Plain functions of finite series; none divides by what FP8 did.

Each is monotone: gaps that are scaled up never make it smaller. A t-test has not that property: one seed far off raises
the standard error, and with it the bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

CAP: Final = 0.01  # nats: what the smoothed loss of FP8 may be off by at most, however far seeds are apart
# Student's t, two-sided 95%, by degrees of freedom; beyond the last one the last one is taken, which is the larger bar.
_T_95: Final = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 15: 2.131, 20: 2.086}


def smooth(values: Sequence[float], window: int) -> tuple[float, ...]:
    """Means over each `window` values in a row: `len(values) - window + 1` of them."""
    return tuple(sum(values[start : start + window]) / window for start in range(len(values) - window + 1))


def subtract(values: Sequence[float], from_them: Sequence[float]) -> tuple[float, ...]:
    """The differences, value by value."""
    return tuple(a - b for a, b in zip(values, from_them, strict=True))


def log_ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """The logarithms of the ratios of two series of norms; two zeros are equal, one zero is infinitely far off."""
    return tuple(_log_ratio(a, b) for a, b in zip(above, below, strict=True))


def spread_of_seeds(curves: Sequence[Sequence[float]]) -> float:
    """The largest sample standard deviation from seed to seed of the smoothed loss, over all windows of a stretch.

    A gap is held to this where it is largest, so it is compared with what seeds do where they differ most: their mean
    over the stretch is small where all have ended at the same loss, and says nothing of the way there.

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


def _variance(values: Sequence[float]) -> float:
    """The sample variance in plain floats: `statistics.variance` raises where it overflows, this is infinite."""
    mean = sum(values) / len(values)
    return sum((value - mean) * (value - mean) for value in values) / (len(values) - 1)


def _log_ratio(above: float, below: float) -> float:
    if above == below:
        return 0.0
    if above == 0 or below == 0:
        return math.inf if below == 0 else -math.inf
    return math.log(above) - math.log(below)
