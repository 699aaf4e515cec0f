"""Layers inside the low-precision scope whose amax is reduced over other ranks than that of the layers around them.

Under expert parallelism other ranks hold the same experts than the same dense layers. A scope for each kind would do,
at a price: whenever an outermost scope ends, Transformer Engine reduces the amax of all layers and updates all their
histories, once forward and once backward. NVTE_UNFUSED_FP8_UPDATE=1 also moves the histories of layers that have not
run, which then reach back over as many scopes, not steps; the fused update leaves those alone. A region is nested in
the scope: there is one update where the scope ends, and one in its backward pass.

That each layer's amax is reduced over the group of the region that it first ran in was read in 2.12.0, 2.17.1 and
2.20.2: a layer notes recipe and group at its first pass, is filed under both, and the updates of forward passes, of
backward passes and of recomputed ones each take recipe and group from that file, whatever scope is on then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from . import imports as te
from .amax_owner import reduction_of
from .open_scopes import Plan, PrecisionScope, scope_around_region
from .te_fp8 import te_delayed_scaling, te_scope, te_state


def amax_shared_with(owner: Any) -> PrecisionScope:
    """A region of the low-precision scope that is open here; layers in it share their amax with other ranks.

    To be called where it is entered. It changes nothing but the group: the recipe is the scope's. Where the scope
    changes nothing, as without Transformer Engine, neither does the region.

    Args:
        owner: as `low_precision` takes its `amax_reduction_group`: the process group of the ranks that hold the same
            layers; or `SINGLE_OWNER`; or None in a world of one rank.

    Raises:
        AmaxGroupMissing: the group was left open, or is none of this rank's.
        AmaxRegionMisplaced: here or on entry: outside of a low-precision scope of this thread, in high precision inside
            one, or inside another region.
        WrongRecomputeOwner: on entry, in what a checkpoint runs, and will run again.
    """
    group, reduce_amax = reduction_of(owner)
    around = scope_around_region(__file__)
    plan = around.plan
    turn = partial(_te_regrouped, plan.recipe == "delayed", group, reduce_amax) if plan.turns_on else _unchanged
    return PrecisionScope(Plan(plan.recipe, plan.choice, plan.reason, False, turn, around))


@contextmanager
def _unchanged(_: str) -> Iterator[None]:
    yield


@contextmanager
def _te_regrouped(is_delayed: bool, group: Any, reduce_amax: bool, _: str) -> Iterator[None]:
    """Nested in Transformer Engine's own scope, which updates nothing where a nested one ends.

    Ending it brings back everything from before, also that no layer has run yet. The first layer of a scope ends its
    backward pass with an update of all histories; had that layer run in here, a second one would, with half of it done.
    """
    recipe = te_delayed_scaling(reduce_amax=reduce_amax) if is_delayed else te_state()["recipe"]
    has_run = False
    try:
        with te_scope(enabled=True, recipe=recipe, amax_reduction_group=group):
            try:
                yield
            finally:
                has_run = not _take_first()
    finally:
        if has_run:
            _take_first()


def _take_first() -> bool:
    """Whether no layer of this scope has run yet with gradients; from now on one has."""
    return bool(te.fp8_state_manager.require().is_first_fp8_module())
