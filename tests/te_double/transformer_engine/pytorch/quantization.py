"""Scopes, the state of this process, and what this device can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from ..recipes import DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from .scaling import DelayedState

_NONE = "the double of Transformer Engine has what an H200 has"


def check_fp8_support() -> tuple[bool, str]:
    """FP8 is emulated, so it is there."""
    return True, ""


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """Block scaling is emulated, so it is there."""
    return True, ""


def check_mxfp8_support() -> tuple[bool, str]:
    """Not there, as on Hopper."""
    return False, f"Device compute capability 10.0 or higher required for MXFP8 execution: {_NONE}."


def check_nvfp4_support() -> tuple[bool, str]:
    """Not there, as on Hopper."""
    return False, f"Device compute capability 10.0 or higher required for NVFP4 execution: {_NONE}."


class _Buffers(type):
    """What Transformer Engine keeps in lists beside the layers' own states."""

    states: list[tuple[bool, DelayedState, DelayedScaling, Any]]

    @property
    def global_amax_buffer(cls) -> dict[str, list[Any]]:
        """The row of each history that collects, by direction."""
        found: dict[str, list[Any]] = {"forward_": [], "backward_": []}
        for forward, state, _, _ in cls.states:
            found["forward_" if forward else "backward_"].append(state.amax_history[0])
        return found


class FP8GlobalStateManager(metaclass=_Buffers):
    """The low-precision state of this process."""

    enabled = False
    calibrating = False
    recipe: Recipe | None = None
    group: Any = None
    parameters = False
    depth = 0
    first_module = False
    phase: Literal["plain", "forward", "recompute"] = "plain"  # of `checkpoint`
    states: list[tuple[bool, DelayedState, DelayedScaling, Any]] = []  # noqa: RUF012 - the state of the process

    @classmethod
    def reset(cls) -> None:
        """Forget everything."""
        cls.enabled = cls.calibrating = cls.parameters = cls.first_module = False
        cls.recipe = cls.group = None
        cls.depth = 0
        cls.phase = "plain"
        cls.states = []

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether a scope is on."""
        return cls.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether the scope only calibrates."""
        return cls.calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether weights are made in low precision."""
        return cls.parameters

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe that is on, or the default one."""
        return cls.recipe if cls.recipe is not None else DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The group over which amax values are reduced."""
        return cls.group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True once in each outermost scope."""
        first, cls.first_module = cls.first_module, False
        return first

    @classmethod
    def autocast_enter(cls, *, enabled: bool, calibrating: bool, recipe: Recipe | None, group: Any) -> None:
        """Turn a scope on."""
        cls.enabled, cls.calibrating, cls.group = enabled, calibrating, group
        cls.recipe = DelayedScaling() if recipe is None else recipe
        cls.first_module = cls.first_module or cls.depth == 0
        cls.depth += 1
        for kind, check in ((MXFP8BlockScaling, check_mxfp8_support), (NVFP4BlockScaling, check_nvfp4_support)):
            usable, reason = check()
            if enabled and isinstance(cls.recipe, kind) and not usable:
                raise AssertionError(reason)

    @classmethod
    def autocast_exit(cls, *, enabled: bool) -> None:
        """Update scales where the outermost scope ends."""
        cls.depth -= 1
        if enabled and cls.depth == 0 and torch.is_grad_enabled():
            cls.reduce_and_update_fp8_tensors(forward=True)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, *, forward: bool) -> None:
        """Delayed scaling: amax values over the group, then new scales."""
        for of_forward, state, recipe, group in cls.states:
            if of_forward is forward:
                if recipe.reduce_amax and torch.distributed.is_initialized():
                    torch.distributed.all_reduce(state.amax_history[0], torch.distributed.ReduceOp.MAX, group)
                state.update()

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Keep the scales of a forward pass for when it is run again."""
        fp8_meta["kept_scales"].append(fp8_meta["scaling_fwd"].scale.clone())

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> Any:
        """The scales that were kept first, and not taken yet."""
        return fp8_meta["kept_scales"].popleft()

    @classmethod
    def snapshot(cls) -> tuple[Any, ...]:
        """What a scope must put back."""
        return cls.enabled, cls.calibrating, cls.recipe, cls.group, cls.first_module

    @classmethod
    def restore(cls, kept: tuple[Any, ...]) -> None:
        """Put it back."""
        cls.enabled, cls.calibrating, cls.recipe, cls.group, cls.first_module = kept


class autocast:  # noqa: N801 - Transformer Engine's name
    """A scope in which layers compute in the recipe's format; the same object may not be entered twice at once."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        self._told = {"calibrating": calibrating, "recipe": recipe, "group": amax_reduction_group}
        self._enabled = enabled
        self._kept: tuple[Any, ...] | None = None

    def __enter__(self) -> autocast:
        if self._kept is not None:
            raise RuntimeError("autocast context manager cannot be entered more than once concurrently")
        self._kept = FP8GlobalStateManager.snapshot()
        FP8GlobalStateManager.autocast_enter(enabled=self._enabled, **self._told)
        return self

    def __exit__(self, *raised: object) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            raise RuntimeError("autocast context manager was left without being entered")
        FP8GlobalStateManager.restore(kept)
        FP8GlobalStateManager.autocast_exit(enabled=self._enabled)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Any = None
) -> autocast:
    """The same by its name before 2.9."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


@contextmanager
def quantized_model_init(enabled: bool = True, recipe: Recipe | None = None) -> Iterator[None]:
    """A scope in which layers are made with quantized weights."""
    kept = FP8GlobalStateManager.parameters, FP8GlobalStateManager.recipe
    FP8GlobalStateManager.parameters = enabled
    FP8GlobalStateManager.recipe = DelayedScaling() if recipe is None else recipe
    try:
        yield
    finally:
        FP8GlobalStateManager.parameters, FP8GlobalStateManager.recipe = kept


def fp8_model_init(enabled: bool = True, recipe: Recipe | None = None) -> AbstractContextManager[None]:
    """The same by its name before 2.9."""
    return quantized_model_init(enabled, recipe)
