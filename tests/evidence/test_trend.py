"""Trends: what moves is seen, what does not is not cried about, and too little is no answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from megacpp_validate.evidence.history import Direction, Trend, TrendPoint
from megacpp_validate.evidence.trend import LONGEST, find_trend


def trend_of(values: Sequence[float]) -> Trend:
    points = [TrendPoint(run=str(number), started="", commit="", value=value) for number, value in enumerate(values)]
    return find_trend("cell", "step_seconds", "s", points)


def noisy(number: int, slope: float, seed: int) -> list[float]:
    noise = random.Random(seed)
    return [10 * (1 + slope * run) * noise.uniform(0.98, 1.02) for run in range(number)]


def test_a_slope_is_found_with_its_interval_beside_slow_runs() -> None:
    values = noisy(30, 0.01, 1)
    values[7] *= 5  # one run on a machine that had other work
    trend = trend_of(values)
    assert trend.direction is Direction.RISING
    assert trend.slope is not None
    assert trend.low is not None
    assert trend.high is not None
    # A share of the median, which is 10 x 1.145: 0.1 a run.
    assert trend.low <= 0.1 / 11.45 <= trend.high
    assert trend.slope == pytest.approx(0.1 / 11.45, rel=0.25)
    assert (trend.first, trend.last, trend.largest) == (values[0], values[-1], values[7])
    assert trend_of(values[::-1]).direction is Direction.FALLING


def test_noise_is_no_trend_more_often_than_the_interval_says() -> None:
    """Of 200 series without one about 5% cry; 10% would be 3.2 standard deviations above."""
    cries = sum(trend_of(noisy(20, 0.0, seed)).direction is not Direction.STEADY for seed in range(200))
    assert cries <= 20


def test_six_runs_are_the_fewest_that_tell() -> None:
    assert trend_of([1, 2, 3, 4, 5]).direction is Direction.UNKNOWN
    assert trend_of([1, 2, 3, 4, 5, 6]).direction is Direction.RISING
    assert trend_of([]).median is None
    assert (trend_of([3.0]).median, trend_of([3.0]).slope) == (3.0, None)


def test_nothing_that_moves_is_steady_and_zero_divides_nothing() -> None:
    assert trend_of([0.0] * 8).direction is Direction.STEADY
    assert trend_of([0.0] * 8).slope == 0.0


def test_the_newest_runs_are_looked_at() -> None:
    trend = trend_of([*range(500)])
    assert len(trend.points) == LONGEST
    assert trend.last == 499
