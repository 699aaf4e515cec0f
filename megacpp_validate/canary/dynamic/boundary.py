"""Compositions: what is red in all modules at once, and in none of them, lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...evidence.findings import Cause
from ...evidence.upgrade import Culprit
from .blame import Order
from .compare import has_evidence
from .red import Red

# What a fault of Transformer Engine or of the bridge shows as; a machine, a library or a time limit is none between
# modules.
_OF_MODULES: Final = frozenset({Cause.API, Cause.NUMERICS, Cause.SILENT_FALLBACK})


def is_first_seen(red: Red, order: Order) -> bool:
    """Whether this is a composition that was not run before: that it is red now says nothing of the step."""
    return red.module not in order.names and not has_evidence(red.before)


def name_boundary(culprit: Culprit, reds: Sequence[Red], order: Order, before: str) -> Culprit:
    """A composition that is red where every module holds, as a culprit of a class of its own; any other as it is."""
    alone = culprit.module not in order.names and not any(red.module in order.names for red in reds)
    if not alone or culprit.module not in {red.module for red in reds} or culprit.cause not in _OF_MODULES:
        return culprit
    return culprit.model_copy(
        update={
            "cause": Cause.BOUNDARY,
            "summary": f"{culprit.summary} Every bridge module holds by itself: it lies between them.",
            "next_step": "turn features off one by one in both releases (`nox -s ablate`): the pair of modules without "
            f"which it holds does not fit; stay on {before} until then",
        }
    )
