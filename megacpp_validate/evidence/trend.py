"""The trend of a quantity over runs: robust against the odd slow run, its interval free of any model of noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Final

from .history import Direction, Trend, TrendPoint
from .selftest import Z_95

LONGEST: Final = 200  # the newest runs that are looked at: slopes of all pairs grow with the square


def find_trend(cell: str, quantity: str, unit: str, points: Sequence[TrendPoint]) -> Trend:
    """Slope over the order of runs, not over time: a machine that stood still for a month did not get slower by that.

    Sen 1968, "Estimates of the regression coefficient based on Kendall's tau", JASA 63(324), 1379-1389: with N slopes
    of pairs of n runs, S = z sqrt(n (n - 1) (2 n + 5) / 18), the interval reaches from the slope of rank (N - S) / 2
    to that of rank (N + S) / 2 + 1. Below 6 runs that rank is less than 1: there is no interval, and no direction.

    Args:
        points: oldest first; the newest `LONGEST` are taken.
    """
    points = tuple(points[-LONGEST:])
    if not points:
        return Trend(cell=cell, quantity=quantity, unit=unit)
    values = [point.value for point in points]
    median = statistics.median(values)
    slope, low, high = _find_slope(values)
    scale = abs(median) or 1.0
    return Trend(
        cell=cell,
        quantity=quantity,
        unit=unit,
        points=points,
        first=values[0],
        median=median,
        last=values[-1],
        smallest=min(values),
        largest=max(values),
        slope=None if slope is None else slope / scale,
        low=None if low is None else low / scale,
        high=None if high is None else high / scale,
        direction=_find_direction(low, high),
    )


def _find_slope(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    number = len(values)
    slopes = sorted((after - before) / (j - i) for (i, before), (j, after) in combinations(enumerate(values), 2))
    if not slopes:
        return None, None, None
    spread = Z_95 * math.sqrt(number * (number - 1) * (2 * number + 5) / 18)
    rank = math.floor((len(slopes) - spread) / 2)
    if rank < 1:
        return statistics.median(slopes), None, None
    return statistics.median(slopes), slopes[rank - 1], slopes[-rank]


def _find_direction(low: float | None, high: float | None) -> Direction:
    if low is None or high is None:
        return Direction.UNKNOWN
    if low > 0:
        return Direction.RISING
    return Direction.FALLING if high < 0 else Direction.STEADY
