"""`checkpoint`: recomputation that keeps FP8 state right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import set_checkpoint_early_stop

from .quantization import FP8GlobalStateManager as Manager
from .quantization import autocast


@contextmanager
def activation_recompute_forward(phase: Literal["forward", "recompute"], first_module: bool) -> Iterator[None]:
    """Layers keep the scales that they use, or take those that they have kept."""
    before = Manager.phase
    Manager.phase = phase
    if phase == "recompute":
        Manager.first_module = first_module
    try:
        yield
    finally:
        Manager.phase = before


class _CheckpointFunction(torch.autograd.Function):
    """The reentrant kind: no graph the first time; the second time one of its own."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], kwargs: dict[str, Any], *args: Any) -> Any:
        """What `function` gives."""
        ctx.function, ctx.kwargs, ctx.first_module = function, kwargs, Manager.first_module
        ctx.fp8 = Manager.is_fp8_enabled()
        ctx.recipe = Manager.get_fp8_recipe() if ctx.fp8 else None
        ctx.save_for_backward(*args)
        with torch.no_grad(), activation_recompute_forward("forward", ctx.first_module):
            return function(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run it again, and through that."""
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with (
            torch.enable_grad(),
            activation_recompute_forward("recompute", ctx.first_module),
            autocast(enabled=ctx.fp8, recipe=ctx.recipe),
        ):
            out = ctx.function(*leaves, **ctx.kwargs)
        torch.autograd.backward(out, grads)
        return (None, None, *(leaf.grad for leaf in leaves))


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args)` and run it again in the backward pass, with the scales of the first time."""
    reentrant = kwargs.pop("use_reentrant", True)
    if kwargs.pop("distribute_saved_activations", False) or kwargs.pop("get_rng_state_tracker", None) is not None:
        raise NotImplementedError("the double of Transformer Engine distributes no activations")
    kwargs.pop("tp_group", None)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if reentrant:
        return _CheckpointFunction.apply(function, kwargs, *args)
    first_module, fp8 = Manager.first_module, Manager.is_fp8_enabled()
    recipe = Manager.get_fp8_recipe() if fp8 else None

    @contextmanager
    def again() -> Iterator[None]:
        with activation_recompute_forward("recompute", first_module), autocast(enabled=fp8, recipe=recipe):
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return activation_recompute_forward("forward", first_module), again()

    with set_checkpoint_early_stop(False):
        return recompute(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
