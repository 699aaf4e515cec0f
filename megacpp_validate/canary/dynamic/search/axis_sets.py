"""Which axes are to blame: every way in which moving some of them may be bad, and which test tells most.

A set of axes is moved to the bad end while the others stay at the good end. That a set is bad makes every larger one
bad; so what is to be found is a family of minimal bad sets: {{te}}: Transformer Engine alone; {{te, cudnn}}: only both
together; {{te}, {cudnn}}: either. There are 1, 4, 18 and 166 such families of 1 to 4 axes (Dedekind's numbers less the
two constant functions), few enough to keep those that fit the answers. Sets are bit masks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

Family = frozenset[int]

MOST_AXES = 4
_RARER = (
    0.1  # how much less is expected of one more axis in a set, and of one more set; it sets the order of tests only
)


@lru_cache
def all_families(axes: int) -> tuple[Family, ...]:
    """Every family of minimal bad sets of `axes` axes, of which all moved together are bad and none moved is not."""
    return tuple(frozenset(chosen) for chosen in _antichains(range(1, 1 << axes)) if chosen)


def is_bad(family: Family, moved: int) -> bool:
    """Whether moving these axes is bad by a family."""
    return any(least & moved == least for least in family)


def keep_fitting(families: Sequence[Family], told: Mapping[int, bool]) -> tuple[Family, ...]:
    """The families that explain every answer."""
    return tuple(family for family in families if all(is_bad(family, moved) is bad for moved, bad in told.items()))


def choose_set(families: Sequence[Family], axes: int, asked: Collection[int]) -> int | None:
    """The set whose answer tells most about which family it is; None where no set is left that tells anything."""
    weights = {family: _expect(family) for family in families}
    total = sum(weights.values())
    best, most = None, 0.0
    for moved in range(1, (1 << axes) - 1):
        if moved in asked:
            continue
        bad = sum(weight for family, weight in weights.items() if is_bad(family, moved))
        tells = bits(bad / total)
        if tells > most + 1e-12:  # equals are told apart by their order, not by how a sum was rounded
            best, most = moved, tells
    return best


def least_sets(sets: Collection[int]) -> tuple[int, ...]:
    """Those that hold no other of them."""
    return tuple(sorted(one for one in sets if not any(other != one and other & one == other for other in sets)))


def bits(chance: float) -> float:
    """What the answer to a yes-or-no question tells on average, in bits."""
    if not 0 < chance < 1:
        return 0.0
    return -chance * math.log2(chance) - (1 - chance) * math.log2(1 - chance)


def _expect(family: Family) -> float:
    return float(_RARER ** (len(family) - 1 + sum(least.bit_count() - 1 for least in family)))


def _antichains(masks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every choice of masks of which none holds another."""
    if not masks:
        yield ()
        return
    first, rest = masks[0], masks[1:]
    yield from _antichains(rest)
    apart = [mask for mask in rest if mask & first not in (mask, first)]
    for chosen in _antichains(apart):
        yield (first, *chosen)
