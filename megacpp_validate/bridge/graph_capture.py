"""CUDA graphs of layers of Transformer Engine: captured by its own function, and replayed only where that is right.

A graph holds addresses and the precision that it was captured in. Transformer Engine replays it whatever has become of
both. Outside of the low-precision scope amax histories stand still; a pass in another recipe gives a layer other scales
than its graph has; a batch of one row is broadcast into the captured one (all seen with 2.12.0 and 2.20.2). An illegal
memory access in the first replay after an evaluation is reported as NVIDIA/TransformerEngine issue 3316. So each replay
is looked at first, and what its graph uses is held.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
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
    """A pass of a captured module that its graph cannot stand for, or that would take away what the graph uses."""


@dataclass(frozen=True)
class _Precision:
    """In what a graph was captured: `is_low` False for BF16, without recipe and group."""

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

    The modules stay what they are. In evaluation mode they run without a graph. Their amax histories and weights are
    those of before.

    Args:
        modules: all in training mode, without hooks; in the order of a forward pass. Each is captured once.
        sample_args: of each, tensors as the training pass will bring them: shape, dtype, device, and whether a gradient
            is wanted. The graph keeps them.
        scope: what `low_precision` or `high_precision` made, not entered: every training pass has to run in such a one.
        warmup: passes before the capture.
        cache_weights: cast weights in the first micro-batch of a step only; each call then says `is_first_microbatch`.

    Returns:
        "te" where there are graphs now; "native" where there is nothing to capture by, and the modules stay as they
        are.

    Raises:
        GraphMisused: modules without the right number of arguments, in evaluation mode, or captured already.

    A captured module raises:
        GraphMisused: in a training pass, where its scope is not the captured one, or where what the graph reads has
            been replaced; in any pass, where a low-precision scope of another recipe or group is open.
        WrongShape: tensors of another number, shape or dtype than captured.
    """
    _check(modules, sample_args)
    choice = choose("graph_capture", (("te", partial(_why_not, scope)), ("native", lambda: None)))
    if choice.observed != "te":
        return choice
    precision = _read(scope)
    many = tuple(modules)
    with unwatched(many):
        te_capture(
            many,
            tuple(tuple(given) for given in sample_args),
            enabled=precision.is_low,
            recipe=precision.recipe,
            amax_reduction_group=precision.group,
            warmup=warmup,
            cache_weights=cache_weights,
        )
    for module, given in zip(many, sample_args, strict=True):
        held = _Held(precision, tuple((tuple(one.shape), one.dtype) for one in given), tuple(_used_by(module)))
        module.forward = partial(_forward, module, held, module.forward)
        _keep_gradients_apart(module)
    return choice


def te_capture(
    modules: tuple[Any, ...],
    sample_args: tuple[tuple[Any, ...], ...],
    *,
    enabled: bool,
    recipe: Any,
    amax_reduction_group: Any,
    warmup: int,
    cache_weights: bool,
) -> Any:
    """CUDA-graphed versions of `modules`, FP8 state kept right."""
    capture = te.make_graphed_callables.require()
    if te.autocast() is not None:
        return capture(
            modules,
            sample_args,
            num_warmup_iters=warmup,
            enabled=enabled,
            recipe=recipe,
            amax_reduction_group=amax_reduction_group,
            cache_quantized_params=cache_weights,
        )
    return capture(
        modules,
        sample_args,
        num_warmup_iters=warmup,
        fp8_enabled=enabled,
        fp8_recipe=recipe,
        fp8_group=amax_reduction_group,
        fp8_weight_caching=cache_weights,
    )


def _keep_gradients_apart(module: Any) -> None:
    """Give each weight a gradient of its own.

    Before 2.19 what a replay gives is the graph's own buffer, which becomes `weight.grad`. The next micro-batch's
    replay overwrites it, and is then added to itself: twice the last gradient, not their sum (seen with 2.12.0).
    """
    if COPIES in inspect.signature(te.make_graphed_callables.require()).parameters:
        return
    for weight in module.parameters():
        if weight.requires_grad:
            weight.register_hook(_copied)


def _copied(gradient: Any) -> Any:
    return gradient.clone()


@dataclass(frozen=True, eq=False)
class _Held:
    """What a graph stands for, and what it uses; held here, none of it is freed under the graph.

    Attributes:
        precision: it was captured in.
        inputs: shape and dtype of each.
        used: name, how to find it anew, and what it was then: the very object, or a weight's address.
    """

    precision: _Precision
    inputs: tuple[tuple[tuple[int, ...], Any], ...]
    used: tuple[tuple[str, Callable[[], Any], Any], ...]


def _forward(module: Any, held: _Held, replay: Callable[..., Any], *given: Any, **options: Any) -> Any:
    scope = current_scope()
    is_right = held.precision.is_now()
    if not is_right and (module.training or (scope is not None and scope.is_low)):
        there = "no low-precision scope" if scope is None or not scope.is_low else f"the scope of {scope.entered_at}"
        raise GraphMisused(
            f"{type(module).__name__} was captured in {held.precision.said()}, and runs in {there}. Likely cause: the "
            "pass is outside of the scope, or the scope has another recipe or reduction group. Next step: run it in "
            "a scope made as the one that was given to capture_graphs; evaluate in that one, or in none."
        )
    if module.training:
        _check_inputs(module, held, given)
        if moved := [name for name, find, then in held.used if not _is_same(find(), then)]:
            raise GraphMisused(
                f"{', '.join(moved[:3])} of {type(module).__name__}: not what its graph uses any more. Likely cause: "
                "weights were replaced and not copied, or its scales were made anew by a pass in another recipe. Next "
                "step: capture it again, and change weights in place."
            )
    return replay(*given, **options)


def _check_inputs(module: Any, held: _Held, given: Sequence[Any]) -> None:
    seen = tuple((tuple(one.shape), one.dtype) for one in given)
    if seen != held.inputs:
        raise WrongShape(
            f"{type(module).__name__} was captured for {_said(held.inputs)}, and is given {_said(seen)}. Likely cause: "
            "a last batch that is smaller. Next step: pad or drop it, or capture another module for it."
        )


def _said(inputs: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in inputs) or "nothing"


def _used_by(module: Any) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """What the graph of a module reads and writes by address, beside its inputs: weights, scales, amax histories."""
    for name, layer in module.named_modules():
        for weight in (key for key, value in layer._parameters.items() if value is not None):
            find = partial(_weight, layer, weight)
            yield f"{name}.{weight}".lstrip("."), find, find()
        for place in _places(layer):
            find = partial(_found, layer, place)
            yield ".".join((name, *map(str, place))).lstrip("."), find, find()


def _places(layer: Any) -> Iterator[tuple[str, ...]]:
    """Of a layer of Transformer Engine, from `pytorch/module/base.py` of 2.12 to 2.20."""
    states, quantizers = getattr(layer, "fp8_meta", None) or {}, getattr(layer, "quantizers", None) or {}
    for direction in DIRECTIONS:
        if direction in states:
            yield "fp8_meta", direction
            yield from (
                ("fp8_meta", direction, part) for part in ("amax_history", "scale") if hasattr(states[direction], part)
            )
        if direction in quantizers:
            yield "quantizers", direction
    for name in getattr(layer, "_fp8_workspaces", None) or {}:
        yield "_fp8_workspaces", name


def _found(layer: Any, place: tuple[str, ...]) -> Any:
    value = getattr(layer, place[0], None)
    for step in place[1:]:
        value = value.get(step) if isinstance(value, dict) else getattr(value, step, None)
    return value


def _weight(layer: Any, name: str) -> tuple[int, int]:
    """Which object a weight is, and where its values lie; a tensor of the vendor's own kind has no one address."""
    weight = layer._parameters[name]
    return id(weight), weight.data_ptr() if type(weight) is torch.nn.Parameter else 0


def _is_same(now: Any, then: Any) -> bool:
    return now == then if isinstance(then, tuple) else now is then


def _check(modules: Sequence[Any], sample_args: Sequence[tuple[Any, ...]]) -> None:
    if len(modules) != len(sample_args):
        raise GraphMisused(
            f"{len(modules)} modules and sample arguments of {len(sample_args)}. Next step: pass one tuple a module."
        )
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
    """What the scope turns on, seen inside of it; without gradients, so that no amax history moves when it is left."""
    with torch.no_grad(), scope as opened:
        if not opened.is_low:
            return _Precision(False)
        state = te_state()
        return _Precision(True, state["recipe"], state["group"])


def _why_not(scope: PrecisionScope) -> Refusal | None:
    plan = scope.plan
    if plan.exclusive and plan.choice.observed != "te":
        return Refusal("te", "not-low", plan.reason)
    if not te.is_te_available():
        return Refusal("te", "te-unavailable", te.why_te_is_unavailable())
    reason = te.make_graphed_callables.why_missing()
    return Refusal("te", "te-unavailable", reason) if reason else None
