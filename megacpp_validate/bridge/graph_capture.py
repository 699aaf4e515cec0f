"""CUDA graphs of layers of Transformer Engine: captured by TE, and checked before each replay.

A graph holds addresses and the precision of its capture, and Transformer Engine replays it when both have changed.
Outside of the low-precision scope amax histories do not move; a pass in another recipe gives a layer other scales than
its graph uses; a batch of one row is broadcast into the captured batch (all seen with 2.12.0 and 2.20.2).
NVIDIA/TransformerEngine issue 3316 reports an illegal memory access in the first replay after an evaluation. So the
bridge checks each replay, and holds what the graph uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from . import imports as te
from .backends import Choice, Refusal, choose
from .errors import BridgeError, WrongShape
from .fp8_scope import PrecisionScope, current_scope
from .layer_watch import unwatched
from .te_fp8 import te_state

DIRECTIONS: Final = ("scaling_fwd", "scaling_bwd")
COPIES: Final = "clone_param_grads_on_return"  # since 2.19, on by default


class GraphMisused(BridgeError, RuntimeError):
    """A pass of a captured module that its graph would compute wrongly, or that would free what the graph uses."""


@dataclass(frozen=True)
class _Precision:
    """The precision of a capture: `is_low` False for BF16, without recipe and group."""

    is_low: bool
    recipe: Any = None
    group: Any = None

    def is_now(self) -> bool:
        """Whether the innermost scope of the bridge is this one."""
        scope = current_scope()
        if scope is None or not scope.is_low:
            return not self.is_low
        state = te_state()
        return self.is_low and state["recipe"] == self.recipe and state["group"] is self.group

    def said(self) -> str:
        """In words."""
        return f"{type(self.recipe).__name__} in the low-precision scope" if self.is_low else "high precision"


def capture_graphs(
    modules: Sequence[Any],
    sample_args: Sequence[tuple[Any, ...]],
    scope: PrecisionScope,
    *,
    warmup: int = 3,
    cache_weights: bool = False,
) -> Choice:
    """Capture a CUDA graph of the training pass of each module, forward and backward; their `forward` replays it.

    In evaluation mode the modules run without a graph. The capture changes neither amax histories nor weights.

    Args:
        modules: in training mode, without hooks, in the order of a forward pass. Each is captured once.
        sample_args: for each module, tensors with shape, dtype, device and `requires_grad` of the training pass. The
            graph keeps them.
        scope: made by `low_precision` or `high_precision`, not entered; every training pass must run in an equal scope.
        warmup: passes before the capture.
        cache_weights: cast weights in the first micro-batch of a step only; calls then pass `is_first_microbatch`.

    Returns:
        "te" after a capture; "native" where nothing can be captured, and the modules stay unchanged.

    Raises:
        GraphMisused: modules in evaluation mode, or captured already.

    A captured module raises:
        GraphMisused: in a training pass in another scope, or after a tensor that the graph reads was replaced; in any
            pass inside a low-precision scope of another recipe or group.
        WrongShape: tensors of another number, shape or dtype than captured.
    """
    _check(modules)
    choice = choose("graph_capture", (("te", partial(_why_not, scope)), ("native", lambda: None)))
    if choice.observed != "te":
        return choice
    precision = _read(scope)
    many = tuple(modules)
    with unwatched(many):
        te_capture(many, tuple(map(tuple, sample_args)), precision, warmup=warmup, cache_weights=cache_weights)
    for module, given in zip(many, sample_args, strict=True):
        used = {name: (value, _address(value)) for name, value in _used_by(module).items()}
        held = _Held(precision, tuple((tuple(one.shape), one.dtype) for one in given), used)
        module.forward = partial(_forward, module, held, module.forward)
        _keep_gradients_apart(module)
    return choice


def te_capture(modules: Any, sample_args: Any, precision: _Precision, *, warmup: int, cache_weights: bool) -> Any:
    """CUDA-graphed versions of `modules`, FP8 state kept right."""
    capture = te.make_graphed_callables.require()
    if te.autocast() is not None:
        return capture(
            modules, sample_args, num_warmup_iters=warmup, enabled=precision.is_low, recipe=precision.recipe,
            amax_reduction_group=precision.group, cache_quantized_params=cache_weights,
        )  # fmt: skip
    return capture(
        modules, sample_args, num_warmup_iters=warmup, fp8_enabled=precision.is_low, fp8_recipe=precision.recipe,
        fp8_group=precision.group, fp8_weight_caching=cache_weights,
    )  # fmt: skip


def _keep_gradients_apart(module: Any) -> None:
    """Copy each weight's gradient out of the graph.

    Before 2.19 a replay returns the graph's own buffer, which becomes `weight.grad`. The replay of the next micro-batch
    overwrites the buffer and is added to it: twice the last gradient, not the sum (seen with 2.12.0).
    """
    if COPIES in inspect.signature(te.make_graphed_callables.require()).parameters:
        return
    for weight in module.parameters():
        if weight.requires_grad:
            weight.register_hook(torch.clone)


@dataclass(frozen=True, eq=False)
class _Held:
    """What a graph was captured with. Objects that are held here are not freed while the graph may use them.

    Attributes:
        precision: precision of the capture.
        inputs: shape and dtype of each.
        used: name -> object and address, of everything that the graph uses beside its inputs.
    """

    precision: _Precision
    inputs: tuple[tuple[tuple[int, ...], Any], ...]
    used: dict[str, tuple[Any, int]]


def _forward(module: Any, held: _Held, replay: Callable[..., Any], *given: Any, **options: Any) -> Any:
    scope = current_scope()
    is_right = held.precision.is_now()
    if not is_right and (module.training or (scope is not None and scope.is_low)):
        there = "no low-precision scope" if scope is None or not scope.is_low else f"the scope of {scope.entered_at}"
        raise GraphMisused(
            f"{type(module).__name__} was captured in {held.precision.said()}, and runs in {there}. Likely cause: the "
            "scope has another recipe or reduction group, or is missing. Next step: run the pass in a scope equal to "
            "that of capture_graphs; evaluate in such a scope, or in none."
        )
    if module.training:
        seen = tuple((tuple(one.shape), one.dtype) for one in given)
        if seen != held.inputs:
            raise WrongShape(
                f"{type(module).__name__} was captured for {held.inputs}, and is given {seen}. Likely cause: a smaller "
                "last batch. Next step: pad or drop it, or capture another module for it."
            )
        now = _used_by(module)
        then = held.used.items()
        if moved := [name for name, (value, at) in then if now.get(name) is not value or _address(value) != at]:
            raise GraphMisused(
                f"the graph of {type(module).__name__} uses another {', '.join(moved[:3])} than the module. Likely "
                "cause: weights were replaced instead of copied, or a pass in another recipe made new scales. Next "
                "step: capture the module again, and change weights in place."
            )
    return replay(*given, **options)


def _used_by(module: Any) -> dict[str, Any]:
    """What the graph of a module reads and writes by address, beside its inputs: weights, scales, amax histories.

    Returns:
        Name -> the object. The layout of FP8 state is that of `pytorch/module/base.py` of 2.12 to 2.20.
    """
    used: dict[str, Any] = {}
    for name, layer in module.named_modules():
        used |= {f"{name}.{key}": weight for key, weight in layer._parameters.items()}
        states, quantizers = getattr(layer, "fp8_meta", None) or {}, getattr(layer, "quantizers", None) or {}
        for direction in DIRECTIONS:
            used[f"{name}.{direction}"] = states.get(direction)
            used[f"{name}.{direction}.amax_history"] = getattr(states.get(direction), "amax_history", None)
            used[f"{name}.{direction}.scale"] = getattr(states.get(direction), "scale", None)
            used[f"{name}.{direction}.quantizers"] = quantizers.get(direction)
        used |= {f"{name}.{key}": cast for key, cast in (getattr(layer, "_fp8_workspaces", None) or {}).items()}
    return {name: value for name, value in used.items() if value is not None}


def _address(used: Any) -> int:
    """Where the values of a weight lie; 0 for other objects, and for TE's weights, which have several addresses."""
    return used.data_ptr() if type(used) is torch.nn.Parameter else 0


def _check(modules: Sequence[Any]) -> None:
    for module in modules:
        why = "is captured already" if _is_captured(module) else "" if module.training else "is in evaluation mode"
        if why:
            raise GraphMisused(
                f"{type(module).__name__} {why}, and only a training pass is captured, once. Next step: capture the "
                "modules of the training pass, after model.train(), each once."
            )


def _is_captured(module: Any) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _read(scope: PrecisionScope) -> _Precision:
    """The precision inside the scope; without gradients, so that leaving it moves no amax history."""
    with torch.no_grad(), scope as opened:
        if not opened.is_low:
            return _Precision(False)
        state = te_state()
        return _Precision(True, state["recipe"], state["group"])


def _why_not(scope: PrecisionScope) -> Refusal | None:
    if scope.exclusive and not scope.is_low:
        return Refusal("te", "not-low", scope.reason)
    if not te.is_te_available():
        return Refusal("te", "te-unavailable", te.why_te_is_unavailable())
    reason = te.make_graphed_callables.why_missing()
    return Refusal("te", "te-unavailable", reason) if reason else None
