"""`checkpoint`: recomputation that keeps FP8 state right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks

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


@contextmanager
def _drawing(state: Any) -> Iterator[None]:
    """Random numbers from this state on; afterwards those that were to come."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class _CheckpointFunction(torch.autograd.Function):
    """The reentrant kind: no graph the first time; the second time one of its own."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], again: Callable[..., Any], first: Any, *args: Any) -> Any:
        """What `function` gives."""
        ctx.again = again
        ctx.save_for_backward(*args)
        with torch.no_grad(), first:
            return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run it again, and through that."""
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        torch.autograd.backward(ctx.again(*leaves), grads)
        return (None, None, None, *(leaf.grad for leaf in leaves))


class _Frame:
    """The other kind: what layers keep for their backward pass is thrown away, and made again when it is asked for."""

    def __init__(self, again: Callable[[], Any]) -> None:
        self.again, self.count = again, 0
        self.made: list[Any] = []

    def drop(self, _: Any) -> int:
        """Of the first pass: a number stands for the tensor."""
        self.count += 1
        return self.count - 1

    def make(self, index: int) -> Any:
        """That tensor, from the second pass."""
        if not self.made:
            with saved_tensors_hooks(self._keep, _as_it_is):
                self.again()
        return self.made[index]

    def _keep(self, tensor: Any) -> Any:
        self.made.append(tensor.detach())
        return tensor.detach()


def _as_it_is(tensor: Any) -> Any:
    return tensor


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args)` and run it again in the backward pass, with the scales of the first time."""
    reentrant = kwargs.pop("use_reentrant", True)
    if kwargs.pop("distribute_saved_activations", False) or kwargs.pop("get_rng_state_tracker", None) is not None:
        raise NotImplementedError("the double of Transformer Engine distributes no activations")
    kwargs.pop("tp_group", None)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    first_module, fp8 = Manager.first_module, Manager.is_fp8_enabled()
    recipe, drawn_from = Manager.get_fp8_recipe() if fp8 else None, torch.get_rng_state()
    called, first = partial(function, **kwargs), activation_recompute_forward("forward", first_module)

    def again(*given: Any) -> Any:
        with (
            torch.enable_grad(),
            _drawing(drawn_from),
            activation_recompute_forward("recompute", first_module),
            autocast(enabled=fp8, recipe=recipe),
        ):
            return called(*given)

    if reentrant:
        return _CheckpointFunction.apply(called, again, first, *args)
    frame = _Frame(partial(again, *args))
    with saved_tensors_hooks(frame.drop, frame.make), first:
        return called(*args)
