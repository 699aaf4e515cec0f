"""Transformer Engine's side of the low-precision scope: its scopes, recipes, support, state and recompute.

Transformer Engine renamed the scope in 2.9 (`fp8_autocast(fp8_recipe=, fp8_group=)` became
`autocast(recipe=, amax_reduction_group=)`); the bridge takes the new name where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from typing import Any, Literal

from . import imports as te

FormatName = Literal["E4M3", "E5M2", "HYBRID"]


def te_scope(*, enabled: bool, recipe: Any, amax_reduction_group: Any) -> AbstractContextManager[Any]:
    """A scope in which TE layers compute in the recipe's format.

    Args:
        enabled: False gives a scope that changes nothing.
        recipe: one of the recipes below.
        amax_reduction_group: process group of the ranks that own the shard; never defaulted.
    """
    scope = te.autocast()
    if scope is not None:
        return scope(enabled=enabled, recipe=recipe, amax_reduction_group=amax_reduction_group)
    return te.fp8_autocast.require()(enabled=enabled, fp8_recipe=recipe, fp8_group=amax_reduction_group)


def te_quantized_weights(*, enabled: bool, recipe: Any) -> AbstractContextManager[Any]:
    """A scope in which TE layers are made with weights in the recipe's format."""
    scope = te.quantized_model_init()
    if scope is not None:
        return scope(enabled=enabled, recipe=recipe)
    return te.fp8_model_init.require()(enabled=enabled, recipe=recipe)


def te_format(name: FormatName) -> Any:
    """One of TE's FP8 formats."""
    formats = te.fp8_format.require()
    if name == "HYBRID":
        return formats.HYBRID
    return formats.E4M3 if name == "E4M3" else formats.E5M2


def te_delayed_scaling(*, reduce_amax: bool = True) -> Any:
    """The production recipe on Hopper: E4M3 forward, E5M2 backward, amax history of 16, its maximum.

    Args:
        reduce_amax: False where this rank alone owns its shard, so that no other rank's amax is taken in.
    """
    return te.delayed_scaling.require()(
        margin=0,
        fp8_format=te_format("HYBRID"),
        amax_history_len=16,
        amax_compute_algo="max",
        reduce_amax=reduce_amax,
    )


def te_current_scaling() -> Any:
    """Per-tensor scales from the tensor at hand."""
    return te.float8_current_scaling.require()(fp8_format=te_format("HYBRID"))


def te_block_scaling() -> Any:
    """One scale a block: 1 x 128 for activations and gradients, 128 x 128 for weights."""
    return te.float8_block_scaling.require()(
        fp8_format=te_format("E4M3"), x_block_scaling_dim=1, w_block_scaling_dim=2, grad_block_scaling_dim=1
    )


def te_mxfp8() -> Any:
    """One scale a block of 32 values; compute capability 10.0 and above."""
    return te.mxfp8_block_scaling.require()(fp8_format=te_format("E4M3"))


def te_nvfp4() -> Any:
    """4-bit values with one scale a block of 16; Blackwell."""
    return te.nvfp4_block_scaling.require()(disable_rht=False, disable_stochastic_rounding=False)


def te_support() -> dict[str, tuple[bool, str]]:
    """Format -> (whether this device and release support it, reason)."""
    check, check_block = te.check_fp8_support(), te.check_fp8_block_scaling_support()
    check_mx, check_nv = te.check_mxfp8_support(), te.check_nvfp4_support()
    no_blocks = te.check_fp8_block_scaling_support.why_missing()
    return {
        "fp8": check() if check else (False, te.check_fp8_support.why_missing()),
        "mxfp8": check_mx() if check_mx else (False, te.check_mxfp8_support.why_missing()),
        "fp8_block_scaling": check_block() if check_block else (False, no_blocks),
        "nvfp4": check_nv() if check_nv else (False, te.check_nvfp4_support.why_missing()),
    }


def te_state() -> dict[str, Any]:
    """The scope that is on in this process: whether, calibrating or not, which recipe, which group."""
    state = te.fp8_state_manager.require()
    enabled = state.is_fp8_enabled()
    return {
        "enabled": enabled,
        "calibrating": state.is_fp8_calibration(),
        "recipe": state.get_fp8_recipe() if enabled else None,
        "group": state.get_fp8_group() if enabled else None,
    }


def te_amax_state(module: Any, *, forward: bool) -> tuple[Any, Any]:
    """What delayed scaling remembers of a layer of Transformer Engine.

    Args:
        module: the layer, after a forward pass under delayed scaling.
        forward: that of input, weight and output; else of the output's and the input's gradients.

    Returns:
        Amax history [steps, tensors] fp32, the newest step last and row 0 still collecting; scales [tensors] fp32.
    """
    state = module.fp8_meta["scaling_fwd" if forward else "scaling_bwd"]
    return state.amax_history, state.scale


def reset_te_state() -> None:
    """Forget every recipe and amax history of this process."""
    te.fp8_state_manager.require().reset()


def te_recompute(function: Callable[..., Any], *tensors: Any, use_reentrant: bool, tp_group: Any = None) -> Any:
    """Run `function(*tensors)` and recompute it in the backward pass with the FP8 state of the first pass.

    The second pass runs in the context of the first: autograd's threads do not know the scopes around this call.
    """
    first: list[Context] = []

    def run(*given: Any, **options: Any) -> Any:
        if first:
            return first[0].copy().run(function, *given, **options)
        first.append(copy_context())
        return function(*given, **options)

    return te.checkpoint.require()(
        run, *tensors, use_reentrant=use_reentrant, distribute_saved_activations=False, tp_group=tp_group
    )
