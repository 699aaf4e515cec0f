"""`make_graphed_callables`: there are no graphs on a CPU, so a replay is an eager pass in what was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .gemm import Mark
from .quantization import FP8GlobalStateManager as Manager


class Graphed(Mark):
    """The name that the graph shows."""


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    enabled: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool = False,
    clone_param_grads_on_return: bool = True,
) -> Any:
    """The modules, whose training passes from now on run in this recipe wherever they are, on copies of their inputs.

    As the real ones they take part in amax reduction where a scope around them ends, and broadcast what they are given.
    """
    is_on, cached = bool(enabled), bool(cache_quantized_params)
    taken = recipe if is_on else None
    one = not isinstance(modules, tuple)
    for module, samples in zip((modules,) if one else modules, (sample_args,) if one else sample_args, strict=True):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise RuntimeError("Modules must not have hooks registered at the time they are passed.")
        for _ in range(num_warmup_iters):
            _warm_up(module, samples, is_on, taken)
        module.forward = partial(_forward, module, module.forward, samples, is_on, taken, cached)
    return modules


def _forward(
    module: Any,
    plain: Callable[..., Any],
    samples: tuple[Any, ...],
    is_on: bool,
    recipe: Any,
    cached: bool,
    *given: Any,
    **options: Any,
) -> Any:
    if not module.training:
        return plain(*given, **options)
    if cached and not isinstance(options.get("is_first_microbatch"), bool):
        raise ValueError("`is_first_microbatch` boolean kwarg must be provided for FP8 weight caching.")
    static = [torch.broadcast_to(one, sample.shape) for one, sample in zip(given, samples, strict=True)]
    with _as_captured(is_on, recipe):
        out = plain(*static, **(options if cached else {}))
    return Graphed.apply(out)


@contextmanager
def _as_captured(is_on: bool, recipe: Any) -> Iterator[None]:
    """The precision of the capture; whether this is the scope's first layer stays the scope's own matter."""
    before = Manager.enabled, Manager.recipe
    Manager.enabled, Manager.recipe = is_on, recipe
    try:
        yield
    finally:
        Manager.enabled, Manager.recipe = before


def _warm_up(module: Any, samples: tuple[Any, ...], is_on: bool, recipe: Any) -> None:
    """A pass that makes each layer's state, and leaves scales and histories as they were."""
    before = {id(state): (state.amax_history.clone(), state.scale.clone()) for state in _states(module)}
    first = Manager.first_module
    with torch.no_grad(), _as_captured(is_on, recipe):
        module(*samples)
    Manager.first_module = first
    for state in _states(module):
        history, scale = before.get(id(state), (torch.zeros(()), torch.ones(())))
        state.amax_history.copy_(history)
        state.scale.copy_(scale)


def _states(module: Any) -> list[Any]:
    metas = [layer.fp8_meta for layer in module.modules() if hasattr(layer, "fp8_meta")]
    return [meta[key] for meta in metas for key in ("scaling_fwd", "scaling_bwd") if key in meta]
