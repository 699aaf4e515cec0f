"""The precisions that a module is timed in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from ..bench import Bench
from ..memory import Enter


def production_precisions(bench: Bench) -> dict[str, Enter]:
    """Name -> what enters the scope: bf16, and the target's production recipe where Transformer Engine is requested.

    Transformer Engine forgets the layers of before: under delayed scaling it goes through all that it has ever seen
    each time a scope is left, so that a module's time would depend on what was judged before it was timed.
    """
    found: dict[str, Enter] = {"bf16": nullcontext}
    if bench.wants_te and (recipe := bench.order.target.production_recipe):
        bench.bridge("fp8_scope").reset_te_state()
        found[f"fp8.{recipe}"] = partial(low_precision, bench)
    return found


def low_precision(bench: Bench) -> AbstractContextManager[Any]:
    """The target's production recipe, as training enters it; where there is none, a scope that changes nothing."""
    fp8 = bench.bridge("fp8_scope")
    return fp8.low_precision(target=bench.order.target.id, amax_reduction_group=fp8.SINGLE_OWNER)
