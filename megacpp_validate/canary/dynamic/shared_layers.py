"""What layers of Transformer Engine share: a matrix product or a norm that is wrong in all of them is one fault.

Numbers have no signature that would tell two faults apart, so modules that run different entry points are one case only
where every entry point that runs the shared code is seen to be wrong, in one direction and from one precision on, and
nothing is wrong that does not run it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...evidence.receipt import Outcome
from ...evidence.values import Cause
from .blame import Case, Order
from .entries import BLOCK, SHARED_PARTS, SharedPart
from .failed_checks import CheckKind, Precision
from .red import Red
from .upgrade_result import Change

_LEVELS: Final = (Precision.FP32, Precision.HALF, Precision.LOW, Precision.ANY)


def share_layers(cases: Sequence[Case], order: Order) -> tuple[Case, ...]:
    """Cases of wrong numbers in one part that their layers share, made one case of the first module that sees it."""
    left = list(cases)
    for part in SHARED_PARTS:
        for way in dict.fromkeys(_way(case.first) for case in left):
            mine = [case for case in left if _way(case.first) == way and _is_by(part, case.first)]
            if len(mine) > 1 and part.shows <= _seen_wrong(red for case in mine for red in case.members):
                left = [case for case in left if case not in mine]
                first = min((case.first for case in mine), key=lambda red: order.rank(red.module))
                others = (red for case in mine for red in case.members if red is not first)
                in_order = tuple(sorted(others, key=lambda red: order.rank(red.module)))
                left.append(Case(first, in_order, part=part))
    return tuple(sorted(left, key=lambda case: order.rank(case.first.module)))


def _way(red: Red) -> tuple[bool, bool, int]:
    """Whether it failed so before, whether the forward pass is wrong, and the highest precision in which it is."""
    numbers = [check for check in red.checks if check.kind is CheckKind.NUMBERS]
    forward = any(check.backward is False for check in numbers)
    level = min((_LEVELS.index(check.precision) for check in numbers), default=len(_LEVELS))
    return red.change is Change.SAME_FAILURE, forward, level


def _is_by(part: SharedPart, red: Red) -> bool:
    """Whether numbers alone are wrong, and each of them is about what runs this part, or can be."""
    reach = part.shows | part.may_show
    # In the block a layer hands what is wrong on to all others: which gradient shows it tells nothing.
    about = (red.uses if check.entries is None or red.module == BLOCK else check.entries for check in red.checks)
    numbers = red.receipt.outcome is Outcome.FAIL and red.diagnosis.cause is Cause.NUMERICS
    return numbers and not red.diagnosis.component and all(one is None or reach & one for one in about)


def _seen_wrong(reds: Iterable[Red]) -> frozenset[str]:
    """Accessors that are wrong by themselves: a check outside of the block is about nothing else."""
    found: set[str] = set()
    for red in reds:
        for check in red.checks if red.module != BLOCK else ():
            about = check.entries if check.entries is not None else red.uses
            if check.kind is CheckKind.NUMBERS and about is not None and len(about) == 1:
                found |= about
    return frozenset(found)
