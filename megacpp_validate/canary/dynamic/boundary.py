"""Compositions: what is red in all modules at once, and in none of them, lies between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ...evidence.values import Cause
from .blame import Order
from .compare import has_evidence
from .entries import USES
from .red import Red
from .upgrade_result import Culprit

# What a fault of Transformer Engine or of the bridge shows as; a machine, a library or a time limit is none between
# modules.
_OF_MODULES: Final = frozenset({Cause.API, Cause.NUMERICS, Cause.SILENT_FALLBACK})


def is_first_seen(red: Red, order: Order) -> bool:
    """Whether this is a composition that was not run before: that it is red now says nothing of the step."""
    return red.module not in order.names and not has_evidence(red.before)


def name_boundary(culprit: Culprit, reds: Sequence[Red], good: Collection[str], before: str) -> Culprit:
    """A composition that is red where no module is, as a culprit of a class of its own; any other as it is.

    Args:
        reds: every red module and composition.
        good: what a receipt says that it holds: a module that nobody ran says nothing of where the fault lies.
    """
    red = next((red for red in reds if red.module == culprit.module), None)
    if red is None or culprit.cause not in _OF_MODULES or any(one.module in USES for one in reds):
        return culprit
    if USES.keys() <= set(good):
        says = "Every bridge module holds by itself: it lies between them."
        step = "turn features off one by one in both releases (`nox -s ablate`): the pair of modules without which it "
        step += f"holds does not fit; stay on {before} until then"
    elif culprit.cause is Cause.API and red.raised is None:  # it holds to a contract of its own, which no module has
        says = "Not every bridge module was run beside it: whether it lies in one or between them is not known."
        step = f"run the bridge modules in both releases first (`nox -s h200_parity`); stay on {before} until then"
    else:
        return culprit
    return culprit.model_copy(
        update={"cause": Cause.BOUNDARY, "summary": f"{culprit.summary} {says}", "next_step": step}
    )
