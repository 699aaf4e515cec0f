"""Whether two arms that took turns differ by more than they would by chance. Plain functions of numbers.

Runs come as off, on, off, on, and so forth. Three things are told apart:

- Noise within a run. Step times follow each other: a slow one comes with others. So the deviation of a run's median or
  mean is taken from resampled blocks of neighbouring steps (circular block bootstrap, Politis and Romano 1992), as long
  as an AR(1) process of the same autocorrelation wants them (Carlstein 1986).
- Noise between runs of one arm: another place in memory, other clocks. Runs of equal arms show it.
- Drift, a machine that gets slower: it would fall on the arm that runs later. A linear trend over the runs is estimated
  with the effect, and taken out of it. The spread of equal arms is left as it is, with the drift in it: a drift that is
  not linear then widens the interval.

The spread is the larger of the two noises, never their difference: so it is too wide rather than too narrow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from .loss_statistics import t_95

RESAMPLES: Final = 200  # of a deviation, which they give to 1 / sqrt(2 * 200) = 5% of itself
_Z_95: Final = 1.96


@dataclass(frozen=True)
class Effect:
    """What the arm "on" changes.

    Attributes:
        change: of the number, on minus off, a linear trend taken out.
        half: of its interval, 95%.
        repeats: how far two runs of one arm lie apart at most.
    """

    change: float
    half: float
    repeats: float

    @property
    def is_noise(self) -> bool:
        """Whether chance may give it: its interval holds 0, or runs of one arm lie as far apart."""
        return abs(self.change) <= self.half or abs(self.change) <= self.repeats


def block_length(values: Sequence[float]) -> int:
    """Steps of a block: (sqrt(6) r / (1 - r^2))^(2/3) n^(1/3) of the lag-1 autocorrelation r (Carlstein 1986).

    At most a quarter of the series: fewer than four blocks say nothing of their spread.
    """
    count = len(values)
    mean = math.fsum(values) / count
    off = [value - mean for value in values]
    whole = math.fsum(value * value for value in off)
    if count < 4 or whole == 0:
        return 1
    lag = math.fsum(a * b for a, b in pairwise(off)) / whole
    lag = min(max(lag, 0.0), 0.9)
    wanted = math.pow(math.sqrt(6) * lag / (1 - lag * lag), 2 / 3) * math.pow(count, 1 / 3)
    return max(1, min(math.ceil(wanted), count // 4))


def block_deviation(values: Sequence[float], statistic: Callable[[Sequence[float]], float], seed: int = 0) -> float:
    """Standard deviation of a statistic of an autocorrelated series; the same for the same series.

    Args:
        values: at least one.
        statistic: of such a series.
        seed: of the draws.
    """
    count, length = len(values), block_length(values)
    ring = [*values, *values[: length - 1]]  # circular: no step is drawn less often than others
    draw = random.Random(seed)  # noqa: S311 - no secret
    blocks = -(-count // length)
    found = []
    for _ in range(RESAMPLES):
        series: list[float] = []
        for start in draw.choices(range(count), k=blocks):
            series += ring[start : start + length]
        found.append(statistic(series[:count]))
    mean = math.fsum(found) / RESAMPLES
    return math.sqrt(math.fsum((value - mean) ** 2 for value in found) / (RESAMPLES - 1))


def estimate_effect(runs: Sequence[float], deviations: Sequence[float]) -> Effect:
    """What "on" changes, from the numbers of runs that took turns.

    With runs y = m + effect * on + trend * place + noise, the least squares estimate is a weighted sum of the runs;
    its variance is that of one run times the sum of the squared weights. One run's deviation is the larger of that of
    equal arms (pooled, 2 * (pairs - 1) degrees of freedom, Student's t) and that within runs (many steps, normal).

    Args:
        runs: off, on, off, on, ...: two pairs or more.
        deviations: of each, within it.
    """
    weights = _weights(len(runs))
    change = math.fsum(weight * run for weight, run in zip(weights, runs, strict=True))
    arms = runs[0::2], runs[1::2]
    pairs = len(arms[0])
    within = math.sqrt(math.fsum(deviation**2 for deviation in deviations) / len(deviations))
    # t_95 counts degrees of freedom from a number of seeds, which is one more.
    half = max(t_95(2 * (pairs - 1) + 1) * _between(runs), _Z_95 * within) * math.hypot(*weights)
    return Effect(change, half, max(max(arm) - min(arm) for arm in arms))


def estimate_shift(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of an autocorrelated series, and half its interval, 95%: as many degrees of freedom as blocks less one."""
    mean = math.fsum(differences) / len(differences)
    blocks = len(differences) // block_length(differences)
    return mean, t_95(blocks) * block_deviation(differences, lambda series: math.fsum(series) / len(series))


def half_between(means: Sequence[float]) -> float:
    """Half the interval, 95%, of the difference of two arms, from how far runs of equal arms lie apart.

    Args:
        means: off, on, off, on, ...: two pairs or more.
    """
    pairs = len(means) // 2
    return t_95(2 * (pairs - 1) + 1) * _between(means) * math.sqrt(2 / pairs)


def _between(runs: Sequence[float]) -> float:
    """Deviation of one run, of equal arms, pooled: 2 * (pairs - 1) degrees of freedom."""
    arms = runs[0::2], runs[1::2]
    pairs = len(arms[0])
    squares = math.fsum((run - math.fsum(arm) / pairs) ** 2 for arm in arms for run in arm)
    return math.sqrt(squares / (2 * (pairs - 1)))


def _weights(count: int) -> list[float]:
    """Of each run in the effect: the part of on against off that a straight line over the runs cannot explain."""
    turns = [-0.5 if place % 2 == 0 else 0.5 for place in range(count)]
    line = [place - (count - 1) / 2 for place in range(count)]
    slope = _dot(turns, line) / _dot(line, line)
    left = [turn - slope * place for turn, place in zip(turns, line, strict=True)]
    return [one / _dot(left, left) for one in left]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
