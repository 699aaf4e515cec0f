"""The low-precision scope: one page of rules, one context variable.

1. `low_precision` is the one way in, and the recipe follows the target. Where Transformer Engine cannot be used, or the
   target has no recipe, the scope changes nothing and its `reason` says why.
2. One low-precision scope at a time. A second entry is an error: what it would do to scales and amax histories differs
   by release, recipe and depth, and shows as drift weeks later.
3. The first and last layers and the auxiliary heads stay in BF16 (`Zones`). `group_scope` enters the scope once for a
   group of layers, or keeps the whole group in BF16 where one of its layers lies in the BF16 zone.
4. High precision nests everywhere; low precision inside it is an error.
5. The scopes around a piece of code are one context variable; the state of Transformer Engine belongs to the process.
   So a scope that turns it on is refused while a scope of another thread wants it otherwise. What `te_recompute` runs
   again in a thread of autograd has the context of its first pass.
6. No low precision is entered in what a checkpoint runs again, and none of torch's checkpoints may run a layer in it.
7. The amax of a shard is reduced over the ranks that its owner names. Layers that other ranks share take a region
   (`amax_shared_with`) inside the scope.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, get_args

import torch
import torch.utils.checkpoint

from . import imports as te

# Some names are imported for callers, who find what belongs to a scope here.
from .amax_owner import SINGLE_OWNER, AmaxGroupMissing, pending_amax_kept, reduction_of  # noqa: F401
from .backends import Choice, Refusal, choose
from .errors import BridgeError, ScopeEnteredTwice, UnknownName, WrongTarget
from .features import FEATURES, PRODUCTION, Features
from .recipes import RECIPES, RecipeName, detect_target, recipe_for  # noqa: F401
from .te_fp8 import (  # noqa: F401
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

SWITCH: Final = "fp8_scope"  # MEGACPP_DISABLE_TE_FP8_SCOPE=1 keeps everything in high precision

# --- checkpoints ------------------------------------------------------------------------------------------------------
# torch's checkpoint knows nothing of scales: begun inside the scope, its second pass runs in high precision; with the
# scope inside its function, each amax is taken in twice. Transformer Engine's checkpoint keeps both, and needs the
# scope around it: with the scope inside, 2.12.0 raises a KeyError, and under 2.20.2 no scale moves.

_TORCH: Final = torch.utils.checkpoint.__file__


class WrongRecomputeOwner(BridgeError, RuntimeError):
    """Low precision in what a checkpoint runs again without keeping its scales."""


def recompute_owners() -> tuple[Literal["te", "torch"], ...]:
    """Whose checkpoints this code runs in, the innermost first, by the frames of this thread; () in none."""
    engine = ""
    if te.TE.module in sys.modules and te.is_te_available():
        module = sys.modules.get(str(getattr(te.checkpoint(), "__module__", "")))
        engine = str(getattr(module, "__file__", "") or "")
    owners: dict[str, Literal["te", "torch"]] = {_TORCH: "torch", engine: "te"}
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    found = (owners[file] for file in files if file in owners)
    return tuple(owner for owner, _ in itertools.groupby(found))


def refuse_torch_recompute(layer: str) -> None:
    """Refuse a layer in low precision inside torch's checkpoint (WrongRecomputeOwner)."""
    if "torch" in recompute_owners():
        raise WrongRecomputeOwner(
            f"{layer} computes in low precision inside torch's checkpoint, which does not keep its scales. Likely "
            "cause: the framework's own activation checkpointing is on. Next step: turn it off for this block, or "
            "recompute the block by te_recompute inside the scope."
        )


# --- scopes -----------------------------------------------------------------------------------------------------------


class AmaxRegionMisplaced(BridgeError, RuntimeError):
    """A region of another amax group that is not directly inside a low-precision scope."""


@dataclass(eq=False)
class PrecisionScope:
    """A scope to be entered by `with`, which gives the scope itself. It can be entered again after it was left.

    Attributes:
        recipe: the recipe that was asked for; None where the target has none, and in a BF16 zone.
        choice: whether Transformer Engine applies it ("te"), or nothing does ("native"), and why.
        reason: why low precision is not on; empty where it is.
        exclusive: whether it asks for low precision, so that there may be no other open.
        turn: from the place of entry, what turns the state of Transformer Engine; it may refuse by raising.
        around: of a region: the low-precision scope that it is a part of.
        entered_at: "file:line" of the last entry.
    """

    recipe: RecipeName | None
    choice: Choice
    reason: str
    exclusive: bool
    turn: Callable[[str], AbstractContextManager[Any]]
    around: PrecisionScope | None = None
    entered_at: str = field(default="", init=False)
    _turned: AbstractContextManager[Any] | None = field(default=None, init=False)  # while it is open

    @property
    def is_low(self) -> bool:
        """Whether layers of Transformer Engine compute in low precision in here."""
        return self.choice.observed == "te"

    @property
    def turns_on(self) -> bool:
        """Whether it turns on state that all threads share."""
        return self.exclusive and self.is_low

    @property
    def is_open(self) -> bool:
        """Whether it was entered and not left."""
        return self._turned is not None

    def __enter__(self) -> PrecisionScope:
        """Open it.

        Raises:
            ScopeEnteredTwice: low precision is asked for inside another scope, or beside a scope of another thread
                that wants the process's state otherwise; the text names both places.
            AmaxRegionMisplaced: it is a region, and the scope that it was made in is not the innermost one here.
            WrongRecomputeOwner: low precision is asked for in what a checkpoint runs, and will run again.
        """
        place, stack = _place_of_entry(), open_here()
        if (self.exclusive or self.around is not None) and (owners := recompute_owners()):
            raise WrongRecomputeOwner(
                f"the low-precision scope was entered at {place}, in what a checkpoint ({owners[0]}) runs again: each "
                "amax would be taken in twice. Next step: enter the scope once, outside, and recompute the block by "
                "te_recompute inside it."
            )
        if self.around is not None and _scope_around_region() is not self.around:
            raise _misplaced(place, "inside another scope than it was made in")
        if self.is_open:
            raise _twice(self.entered_at, place, "it is the same scope object")
        if self.exclusive and stack:
            outer = next((one for one in stack if one.exclusive), stack[-1])
            why = "" if outer.exclusive else f"that one keeps its inside in high precision: {outer.reason}"
            raise _twice(outer.entered_at, place, why)
        _claim(self, stack, place)
        try:
            with contextlib.ExitStack() as entered:
                if self.turns_on and self.recipe == "delayed" and not torch.is_grad_enabled():
                    entered.enter_context(pending_amax_kept())
                entered.enter_context(self.turn(place))
                self._turned = entered.pop_all()
        except BaseException:
            _release(self)
            raise
        self.entered_at = place
        _around.set((*stack, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, and every scope that is still open inside it.

        Raises:
            BridgeError: one was, and nothing else is being raised.
        """
        if not self.is_open:  # an outer scope has closed this one, and raised for it
            return
        stack = open_here()
        inner = stack[stack.index(self) + 1 :] if self in stack else ()
        for one in (*reversed(inner), self):
            one._close(kind, fault, trace)
        if inner and fault is None:
            raise BridgeError(
                f"the precision scope entered at {self.entered_at} was left while the one entered inside it at "
                f"{', '.join(one.entered_at for one in inner)} was open; both are closed now. Likely cause: a "
                "generator or task that was suspended inside its scope. Next step: leave scopes in the reverse order "
                "of entry."
            )

    def _close(self, *raised: Any) -> None:
        turned, self._turned = self._turned, None
        _around.set(open_here())
        try:
            if turned is not None:
                turned.__exit__(*raised)
        finally:
            _release(self)


# The scopes entered around this code, the outermost first; one that was left in another context is still listed.
_around: Final[ContextVar[tuple[PrecisionScope, ...]]] = ContextVar("megacpp_precision_scopes", default=())
_lock: Final = threading.RLock()  # a collected generator may close its scope while this thread holds it
_claims: dict[PrecisionScope, tuple[str, str]] = {}  # scopes open anywhere in the process: place and thread


def open_here() -> tuple[PrecisionScope, ...]:
    """The scopes that are open around this code, the outermost first."""
    return tuple(one for one in _around.get() if one.is_open)


def current_scope() -> PrecisionScope | None:
    """The innermost scope that is open around this code; None outside of all."""
    stack = open_here()
    return stack[-1] if stack else None


def _claim(scope: PrecisionScope, stack: tuple[PrecisionScope, ...], place: str) -> None:
    """Note an open scope, unless a scope of another thread wants the state of Transformer Engine otherwise.

    Where Transformer Engine is off right now, high precision is noted too: it would not see another thread turn it on.
    """
    if not scope.turns_on and (scope.exclusive or scope.around is not None):
        return
    with _lock:
        for other, (first, thread) in _claims.items():
            if other not in stack and (scope.turns_on or other.turns_on):
                why = f"that was in the thread {thread}, and all threads share its state"
                raise _twice(first, place, why, "low" if scope.turns_on else "high")
        _claims[scope] = place, threading.current_thread().name


def _release(scope: PrecisionScope) -> None:
    with _lock:
        _claims.pop(scope, None)


def _twice(first: str, second: str, why: str, asked: Literal["low", "high"] = "low") -> ScopeEnteredTwice:
    more = f" ({why})" if why else ""
    return ScopeEnteredTwice(
        f"the {asked}-precision scope was entered at {second} while the one entered at {first} is open{more}. Likely "
        "cause: a layer enters the scope of its model again, a generator yielded inside it, or another thread computes "
        "at the same time. Next step: enter it at one of the two places only."
    )


def _misplaced(place: str, where: str) -> AmaxRegionMisplaced:
    return AmaxRegionMisplaced(
        f"a region of another amax group was entered at {place} {where}. Next step: enter low_precision first, and "
        "amax_shared_with directly inside it, once around these layers."
    )


def _place_of_entry() -> str:
    """Who entered, "file:line": the innermost caller outside of this file and of contextlib."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, contextlib.__file__) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# --- low and high precision -------------------------------------------------------------------------------------------

# Recipe -> the question of `te_support` that Transformer Engine asks before it takes it, and what makes it.
_RECIPES: Final[dict[RecipeName, tuple[str, Callable[[], Any]]]] = {
    "delayed": ("fp8", te_delayed_scaling),
    "current": ("fp8", te_current_scaling),
    "block": ("fp8_block_scaling", te_block_scaling),
    "mxfp8": ("mxfp8", te_mxfp8),
    "nvfp4": ("nvfp4", te_nvfp4),
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
        return PrecisionScope(name, choice, reason, True, lambda _: contextlib.nullcontext())
    if refused := why_recipe_is_refused(name):
        raise WrongTarget(
            f"Transformer Engine refuses the recipe {name} here: {refused.rstrip('.')}. Likely cause: its release or "
            f"the CUDA of this environment is older than the target {target} wants. Next step: name another recipe."
        )
    return PrecisionScope(name, choice, "", True, partial(_te_turned_on, name, group, reduce_amax))


def why_recipe_is_refused(recipe: RecipeName) -> str:
    """Why Transformer Engine, which must be there, has no such recipe in this environment; empty where it has."""
    supported, why = te_support()[_RECIPES[recipe][0]]
    return "" if supported else why or "it does not say why"


def high_precision(because: str) -> PrecisionScope:
    """A scope in which layers of Transformer Engine compute in their weights' own dtype, whatever is around it.

    Args:
        because: why, for `current_scope()`.

    Raises:
        ScopeEnteredTwice: on entry, where another thread is in low precision: all threads share that state.
    """
    choice = choose("fp8_scope", (("native", lambda: None),))
    return PrecisionScope(None, choice, because, False, _te_turned_off)


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
def _te_turned_on(name: RecipeName, group: Any, reduce_amax: bool, place: str) -> Iterator[None]:
    state = te_state()
    if state["enabled"] or state["calibrating"]:
        raise ScopeEnteredTwice(
            f"the low-precision scope was entered at {place} while Transformer Engine's own scope is on, entered by "
            "code that is not the bridge's. Next step: enter it at one of the two places only."
        )
    with te_scope(enabled=True, recipe=te_recipe(name, reduce_amax=reduce_amax), amax_reduction_group=group):
        yield


def te_recipe(name: RecipeName, *, reduce_amax: bool) -> Any:
    """Transformer Engine's own object of a recipe."""
    return te_delayed_scaling(reduce_amax=reduce_amax) if name == "delayed" else _RECIPES[name][1]()


@contextmanager
def _te_turned_off(_: str) -> Iterator[None]:
    if te.TE.module in sys.modules and te.is_te_available():
        state = te_state()
        if state["enabled"] or state["calibrating"]:
            with te_scope(enabled=False, recipe=state["recipe"], amax_reduction_group=state["group"]):
                yield
            return
    yield


# --- regions of another amax group ------------------------------------------------------------------------------------
# Under expert parallelism other ranks hold the same experts than the same dense layers. A region is nested in the
# scope, so there is one amax update where the scope ends, and one in its backward pass. That each layer's amax is
# reduced over the group of the region that it first ran in was read in 2.12.0, 2.17.1 and 2.20.2.


def amax_shared_with(owner: Any) -> PrecisionScope:
    """A region of the low-precision scope that is open here; layers in it share their amax with other ranks.

    To be called where it is entered. It changes nothing but the group. Where the scope changes nothing, as without
    Transformer Engine, neither does the region.

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
    around = _scope_around_region()
    turn: Callable[[str], AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()  # noqa: E731
    if around.turns_on:
        turn = partial(_te_regrouped, around.recipe == "delayed", group, reduce_amax)
    return PrecisionScope(around.recipe, around.choice, around.reason, False, turn, around)


def _scope_around_region() -> PrecisionScope:
    """The low-precision scope of this thread that a region can be a part of; raises AmaxRegionMisplaced."""
    stack, place = open_here(), _place_of_entry()
    if not stack:
        raise _misplaced(place, "outside of every scope of this thread")
    inner = stack[-1]
    if inner.around is not None or not inner.exclusive:
        raise _misplaced(place, f"inside the one entered at {inner.entered_at}")
    return inner


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


# --- zones ------------------------------------------------------------------------------------------------------------
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
        if min(self.num_layers, self.first, self.last) < 0 or self.first + self.last > self.num_layers:
            raise WrongZone(
                f"the first {self.first} and the last {self.last} of {self.num_layers} layers are negative or overlap. "
                "Likely cause: num_layers counts one pipeline stage. Next step: pass the layers of the whole model."
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
                raise UnknownName(f"there is no auxiliary head {place!r}. Next step: choose one of {', '.join(HEADS)}.")
            return f"{place} is an auxiliary head, which stays in BF16"
        if not 0 <= place < self.num_layers:
            raise WrongZone(
                f"there is no layer {place!r} among {self.num_layers}. Next step: pass the index in the whole model, "
                "not in a pipeline stage."
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
        more = ", and a group stays together" if len(layers) > 1 else ""
        return f"{reasons[0]}{more}" if reasons else ""


def group_scope(
    layers: Sequence[int | Head],
    zones: Zones,
    factories: Sequence[Callable[[], AbstractContextManager[PrecisionScope]]],
) -> AbstractContextManager[PrecisionScope]:
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
        raise WrongZone(f"{len(layers)} layers and {len(factories)} scope factories. Next step: pass one a layer.")
    return high_precision(because) if because else factories[0]()
