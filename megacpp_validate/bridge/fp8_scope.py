"""The low-precision scope, its recipes and what goes with them.

`low_precision` is the one way in; `group_scope` enters it for a group of layers, or keeps the group in BF16. Where
Transformer Engine cannot be used, or the target has no recipe, the scope changes nothing and its `Scope` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, get_args

from . import imports as te
from .amax_owner import SINGLE_OWNER, AmaxGroupMissing, Owner, reduction_of
from .backends import Refusal, choose
from .errors import BridgeError, ScopeEnteredTwice, UnknownName, WrongTarget
from .features import FEATURES, PRODUCTION, Features
from .open_scopes import Plan, PrecisionScope, Scope, current_scope, scope_around_region
from .recipes import RECIPES, RecipeName, detect_target, recipe_for
from .te_fp8 import (
    reset_te_state,
    te_amax_state,
    te_block_scaling,
    te_current_scaling,
    te_delayed_scaling,
    te_mxfp8,
    te_nvfp4,
    te_quantized_weights,
    te_recompute,
    te_scope,
    te_state,
    te_support,
)

# --- amax region ------------------------------------------------------------------------------------------------------
# Layers inside the low-precision scope whose amax is reduced over other ranks than that of the layers around them.
#
# Under expert parallelism other ranks hold the same experts than the same dense layers. A scope for each kind would
# do, at a price: whenever an outermost scope ends, Transformer Engine reduces the amax of all layers and updates all
# their histories, once forward and once backward. NVTE_UNFUSED_FP8_UPDATE=1 also moves the histories of layers that
# have not run, which then reach back over as many scopes, not steps; the fused update leaves those alone. A region is
# nested in the scope: there is one update where the scope ends, and one in its backward pass.
#
# That each layer's amax is reduced over the group of the region that it first ran in was read in 2.12.0, 2.17.1 and
# 2.20.2: a layer notes recipe and group at its first pass, is filed under both, and the updates of forward passes, of
# backward passes and of recomputed ones each take recipe and group from that file, whatever scope is on then.


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


# --- fp8 scope --------------------------------------------------------------------------------------------------------


# --- zones ------------------------------------------------------------------------------------------------------------
# Which layers stay in BF16: the first ones, the last ones, and every auxiliary head.
#
# The ends of a stack, and the heads above it, lose most to rounding and gain least: Nemotron-H (arXiv:2504.03624) was
# trained in FP8 with the first and last four matrix products in BF16.


Head = Literal["lm_head", "mtp"]
HEADS: Final[tuple[Head, ...]] = get_args(Head)


class WrongZone(BridgeError, ValueError):
    """A BF16 zone, a layer or a group of layers that there cannot be."""


@dataclass(frozen=True)
class Zones:
    """The BF16 zones of a stack of layers.

    Attributes:
        num_layers: layers of the whole model, over all pipeline stages.
        first: how many of the first layers stay in BF16.
        last: how many of the last ones do.

    Raises:
        WrongZone: a negative number, or zones that overlap.
    """

    num_layers: int
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_layers, self.first, self.last)
        if any(not isinstance(count, int) or isinstance(count, bool) or count < 0 for count in counts):
            raise WrongZone(
                f"zones are numbers of layers, not {counts}. Next step: pass num_layers, first and last as integers "
                "from 0 up."
            )
        if self.first + self.last > self.num_layers:
            raise WrongZone(
                f"the first {self.first} and the last {self.last} of {self.num_layers} layers overlap: nothing would "
                "be left in low precision. Likely cause: num_layers counts one pipeline stage only. Next step: pass "
                "the layers of the whole model, or smaller zones."
            )

    def why_bf16(self, place: int | Head) -> str:
        """Why a layer or head stays in BF16; empty where it does not.

        Args:
            place: index of a layer in the whole model from 0, or the name of an auxiliary head.

        Raises:
            WrongZone: there is no such layer.
            UnknownName: there is no such head.
        """
        if isinstance(place, str):
            if place not in HEADS:
                raise UnknownName(
                    f"there is no auxiliary head {place!r}. Next step: choose one of {', '.join(HEADS)}, or pass the "
                    "index of a layer."
                )
            return f"{place} is an auxiliary head, which stays in BF16"
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < self.num_layers:
            raise WrongZone(
                f"there is no layer {place!r} among {self.num_layers}. Likely cause: an index within a pipeline "
                f"stage. Next step: pass the index in the whole model, 0 to {self.num_layers - 1}."
            )
        if place < self.first:
            return f"layer {place} is one of the first {self.first}, which stay in BF16"
        if place >= self.num_layers - self.last:
            return f"layer {place} is one of the last {self.last}, which stay in BF16"
        return ""

    def is_bf16(self, place: int | Head) -> bool:
        """Whether a layer or head stays in BF16; raises as `why_bf16`."""
        return bool(self.why_bf16(place))

    def why_group_is_bf16(self, layers: Sequence[int | Head]) -> str:
        """Why a group of layers stays in BF16 as a whole: one of them does; empty where none does.

        Raises:
            WrongZone: the group is empty, or has a layer that there is not.
            UnknownName: there is no such head.
        """
        if not layers:
            raise WrongZone("a group without layers has no precision. Next step: pass the layers that it runs.")
        reasons = [reason for reason in map(self.why_bf16, layers) if reason]
        if not reasons:
            return ""
        return f"{reasons[0]}, and a group stays together" if len(layers) > 1 else reasons[0]


# --- fp8 scope --------------------------------------------------------------------------------------------------------


__all__ = [
    "RECIPES",
    "SINGLE_OWNER",
    "AmaxGroupMissing",
    "Owner",
    "PrecisionScope",
    "RecipeName",
    "Scope",
    "WrongZone",
    "Zones",
    "current_scope",
    "detect_target",
    "group_scope",
    "high_precision",
    "low_precision",
    "recipe_for",
    "reset_te_state",
    "te_amax_state",
    "te_block_scaling",
    "te_current_scaling",
    "te_delayed_scaling",
    "te_mxfp8",
    "te_nvfp4",
    "te_quantized_weights",
    "te_recompute",
    "te_scope",
    "te_state",
    "te_support",
    "why_recipe_is_refused",
]

SWITCH: Final = "fp8_scope"  # MEGACPP_DISABLE_TE_FP8_SCOPE=1 keeps everything in high precision

# Recipe -> the question of `te_support` that Transformer Engine asks before it takes it.
_SUPPORT: Final[dict[RecipeName, str]] = {
    "delayed": "fp8",
    "current": "fp8",
    "block": "fp8_block_scaling",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


def low_precision(
    *, target: str, amax_reduction_group: Any, recipe: str | None = None, features: Features = PRODUCTION
) -> PrecisionScope:
    """A scope in which layers of Transformer Engine compute in the recipe of the target.

    Run forward passes in it, each layer once, and backward passes outside: amax histories move when it is left.

    Args:
        target: id or arch of the target; `detect_target()` gives the one that is there.
        amax_reduction_group: process group of the ranks that hold the same shard, from whoever owns it; or
            `SINGLE_OWNER`; or None in a world of one rank. There is no default.
        recipe: one that the target has; its production recipe without it.
        features: flags that hold; a preset that is off keeps the scope off.

    Raises:
        UnknownName: there is no such target or recipe.
        WrongTarget: the target is not the machine that is there, or cannot have this recipe.
        AmaxGroupMissing: the group was left open, or is none of this rank's.
        ScopeEnteredTwice: on entry, where a scope is open already, here or in another thread; the text names both.
    """
    name = recipe_for(target, recipe)
    group, reduce_amax = reduction_of(amax_reduction_group)
    choice = choose("fp8_scope", (("te", partial(_why_not_te, features, target, name)), ("native", lambda: None)))
    reason = "; ".join(refusal.reason for refusal in choice.refusals)
    if name is None or choice.observed != "te":
        return PrecisionScope(Plan(name, choice, reason, True, _unchanged))
    if refused := why_recipe_is_refused(name):
        raise WrongTarget(
            f"Transformer Engine refuses the recipe {name} here: {refused.rstrip('.')}. Likely cause: its release or "
            f"the CUDA of this environment is older than the target {target} wants. Next step: upgrade that, or name "
            "another recipe."
        )
    return PrecisionScope(Plan(name, choice, "", True, partial(_te_turned_on, name, group, reduce_amax)))


def why_recipe_is_refused(recipe: RecipeName) -> str:
    """Why Transformer Engine, which must be there, has no such recipe in this environment; empty where it has."""
    supported, why = te_support()[_SUPPORT[recipe]]
    return "" if supported else why or "it does not say why"


def high_precision(because: str) -> PrecisionScope:
    """A scope in which layers of Transformer Engine compute in their weights' own dtype, whatever is around it.

    It nests everywhere in its own thread. Low precision inside it is refused: amax histories only move where the
    outermost scope of Transformer Engine is a low one, so there they would stand still.

    Args:
        because: why, for `current_scope()`.

    Raises:
        ScopeEnteredTwice: on entry, where another thread is in low precision: all threads share that state, so that
            thread would compute in high precision, or this one in low.
    """
    choice = choose("fp8_scope", (("native", lambda: None),))
    return PrecisionScope(Plan(None, choice, because, False, _te_turned_off))


def group_scope(
    layers: Sequence[int | Head], zones: Zones, factories: Sequence[Callable[[], AbstractContextManager[Scope]]]
) -> AbstractContextManager[Scope]:
    """The scope of a group of layers that run one after the other: entered once for all, or not at all.

    Args:
        layers: indices in the whole model, or names of auxiliary heads.
        zones: which of them stay in BF16; one that does keeps the whole group out.
        factories: of each layer, what makes its scope; that of index 0 makes the group's.

    Raises:
        WrongZone: no layers, a layer that there is not, or another number of factories.
        UnknownName: there is no such head.
    """
    because = zones.why_group_is_bf16(layers)
    if len(factories) != len(layers):
        raise WrongZone(
            f"{len(layers)} layers and {len(factories)} scope factories. Next step: pass one factory a layer, in order."
        )
    return high_precision(because) if because else factories[0]()


def _why_not_te(features: Features, target: str, recipe: RecipeName | None) -> Refusal | None:
    if recipe is None:
        return Refusal("te", "no-recipe", f"the target {target} has no low-precision recipe")
    if not te.is_te_available():
        return Refusal("te", "te-unavailable", te.why_te_is_unavailable())
    for name in (features.preset, SWITCH):
        if not te.is_te_enabled_for(name):
            return Refusal("te", "switched-off", te.why_te_is_disabled_for(name))
    if not any(getattr(features, feature) for feature in FEATURES):
        return Refusal("te", "flag-off", f"every feature is off in the preset {features.preset}")
    return None


@contextmanager
def _unchanged(_: str) -> Iterator[None]:
    yield


@contextmanager
def _te_turned_on(name: RecipeName, group: Any, reduce_amax: bool, place: str) -> Iterator[None]:
    state = te_state()
    if state["enabled"] or state["calibrating"]:
        recipe = type(state["recipe"]).__name__ if state["enabled"] else "calibrating"
        raise ScopeEnteredTwice(
            f"the low-precision scope was entered at {place} while Transformer Engine's own scope is on ({recipe}), "
            "entered by code that is not the bridge's. Likely cause: a framework around this one enters it per layer. "
            "Next step: enter it at one of the two places only."
        )
    entered = False
    try:
        with te_scope(enabled=True, recipe=_te_recipe(name, reduce_amax), amax_reduction_group=group):
            entered = True
            yield
    except Exception as fault:
        if not entered and te_state()["enabled"]:  # seen with recipes that the device lacks, 2.12 to 2.20
            raise BridgeError(
                f"Transformer Engine raised when its scope was entered at {place}, and left it on: {fault}. Next step: "
                "end this process; whatever runs in it now computes in low precision."
            ) from fault
        raise


@contextmanager
def _te_turned_off(_: str) -> Iterator[None]:
    if te.TE.module not in sys.modules or not te.is_te_available():
        yield
        return
    state = te_state()
    if not state["enabled"] and not state["calibrating"]:
        yield
        return
    with te_scope(enabled=False, recipe=state["recipe"], amax_reduction_group=state["group"]):
        yield


def _te_recipe(name: RecipeName, reduce_amax: bool) -> Any:
    if name == "delayed":
        return te_delayed_scaling(reduce_amax=reduce_amax)
    if name == "current":
        return te_current_scaling()
    if name == "block":
        return te_block_scaling()
    return te_mxfp8() if name == "mxfp8" else te_nvfp4()
