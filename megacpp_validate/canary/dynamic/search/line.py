"""Where along one axis: the next value to try between the last good and the first bad one."""

from __future__ import annotations

from collections.abc import Collection

from .axis_sets import bits

# Chance that the value next to one that could not be told cannot be told either. It sets how far to jump; from 0.4 on
# the uneven halves cost more environments than ceil(log2 n) + 3 among 30 and 60 releases.
_LIKE_ITS_NEIGHBOUR = 1 / 3


def choose_value(good: int, bad: int, untold: Collection[int], absent: Collection[int] = ()) -> int | None:
    """The value between `good` and `bad` whose answer tells most; None where there is none left.

    Halving, as long as everything can be told. Releases that cannot be built or imported come in runs, so that the
    neighbours of one are likely to be alike: a value d steps away from the nearest such one can be told with a chance
    of 1 - (1 / 3) ** d, and what it would tell is weighed with that. `git bisect skip` jumps away at random for the
    same reason.

    Args:
        good, bad: indices of the last good value and the first bad one.
        untold: values that were asked for and could not be told.
        absent: values that cannot be asked for.
    """
    steps = [value for value in range(good + 1, bad) if value not in absent]
    blind = [rank for rank, value in enumerate(steps) if value in untold]
    best, most = None, 0.0
    for rank, value in enumerate(steps):
        if rank in blind:
            continue
        apart = min((abs(rank - other) for other in blind), default=None)
        chance = 1.0 if apart is None else 1 - _LIKE_ITS_NEIGHBOUR**apart
        tells = chance * bits((rank + 1) / (len(steps) + 1))
        if tells > most + 1e-12:
            best, most = value, tells
    return best
