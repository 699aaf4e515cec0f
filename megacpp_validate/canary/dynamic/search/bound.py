"""What no search can do without: the yardstick for the runs that this one takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from .axis_sets import bits
from .repeats import Trust


def least_runs(sizes: Sequence[int], trust: Trust, together: int = 1) -> float:
    """Runs that every search needs on average over all answers; rounded up, those that the worst answer needs.

    Both ends are to be confirmed: one run each, or Wald's bound on sequential tests where a run may be wrong. Between
    them any value of any axis but its first may be where it turns bad, and a run gives one bit at most, or the capacity
    of a binary symmetric channel where it may be wrong (Fano's inequality).

    Args:
        sizes: number of values of each axis.
        trust: in a single run, and what error is allowed.
        together: axes that are bad only together; the search is not told so, but must tell such answers apart.
    """
    answers = sum(math.prod(size - 1 for size in chosen) for chosen in combinations(sizes, together))
    told = math.log2(answers) if answers > 1 else 0.0
    if not trust.flaky:
        return 2 + told
    flaky, error = trust.flaky, trust.error
    odds = math.log((1 - flaky) / flaky)
    end = max(1.0, (1 - 2 * error) * math.log((1 - error) / error) / ((1 - 2 * flaky) * odds))
    between = max(0.0, (1 - error) * told - bits(error)) / (1 - bits(flaky))
    return 2 * end + between
