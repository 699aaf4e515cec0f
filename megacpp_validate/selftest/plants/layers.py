"""Faults in what a layer has: its bias, halves, experts, and the order of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...bridge.te_fp8 import te_scope, te_state
from ...evidence.selftest import Mutant
from ...native.rope import apply_rope
from ..trace import Trace
from .calls import Call, around_calls


def plant_bias_dropped(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """The output without the layer's bias."""
    del mutant

    def around(call: Call) -> Any:
        out, bias = call.run(), call.parameter("bias")
        if bias is None or not bias.numel():
            return out
        dropped = out - bias
        trace.note(out, dropped)
        return dropped

    return around_calls(target, around)


def plant_halves_swapped(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Compute with the halves of a parameter swapped, along its first axis."""
    name = str(mutant.parameters["name"])

    def around(call: Call) -> Any:
        weight = call.parameter(name)
        if weight is None:
            raise trace.is_gone(f"{mutant.at} has no parameter {name!r}. Next step: see what it is called now.")
        swapped = torch.cat(weight.chunk(2)[::-1])
        trace.note(weight, swapped)
        with _with_parameters(call.owner, {name: swapped}):
            return call.run()

    return around_calls(target, around)


def plant_experts_exchanged(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Give one expert's rows the weight of another: weight0, weight1, ... of a layer, or a `weight` [E, N, K]."""
    first, second = int(mutant.parameters["first"]), int(mutant.parameters["second"])

    def around(call: Call) -> Any:
        weight = call.arguments.get("weight")
        if isinstance(weight, torch.Tensor):
            order = list(range(weight.shape[0]))
            if max(first, second) < len(order):
                order[first], order[second] = second, first
            call.arguments["weight"] = weight[order]
            trace.note(weight, call.arguments["weight"])
            return call.run()
        one, other = call.parameter(f"weight{first}"), call.parameter(f"weight{second}")
        if one is None or other is None:
            if call.parameter("weight0") is None:
                raise trace.is_gone(f"{mutant.at} holds no weight an expert. Next step: see how it holds them now.")
            return call.run()  # a bank of fewer experts
        trace.note(one, other)
        with _with_parameters(call.owner, {f"weight{first}": other, f"weight{second}": one}):
            return call.run()

    return around_calls(target, around)


def plant_rope_late(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Turn what attention gives instead of what it gets. The target is a block whose call takes `rope`."""

    def around(call: Call) -> Any:
        rope = call.arguments.get("rope")
        if "rope" not in call.arguments:
            raise trace.is_gone(f"{mutant.at} takes no rope. Next step: point the mutant at the block that does.")
        if rope is None:
            return call.run()
        call.arguments["rope"] = None
        trace.note_use()
        turned = _Turned(call.owner.attention, rope)
        call.owner.__dict__["attention"] = turned  # found before the module of that name
        try:
            return call.run()
        finally:
            del call.owner.__dict__["attention"]

    return around_calls(target, around)


class _Turned:
    """Attention over [B, T, H, D] whose output [B, T, H x D] is turned."""

    def __init__(self, attention: Any, rope: tuple[Any, Any]) -> None:
        self.attention, self.rope = attention, rope

    def __call__(self, query: Any, *others: Any, **options: Any) -> Any:
        out = self.attention(query, *others, **options)
        heads = out.view(query.shape).transpose(1, 2)
        return apply_rope(heads, *self.rope).transpose(1, 2).reshape(out.shape)


def plant_scope_ignored(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Compute as outside of every low-precision scope."""
    del mutant

    def around(call: Call) -> Any:
        state = te_state()
        if not state["enabled"]:
            return call.run()
        trace.note_use()
        with te_scope(enabled=False, recipe=state["recipe"], amax_reduction_group=state["group"]):
            return call.run()

    return around_calls(target, around)


def plant_parameters_cloned(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Give the layer that comes out copies of the parameters that it should share."""
    return _with_other_parameters(target, mutant, trace, lambda parameter: parameter.detach().clone())


def plant_parameters_fresh(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Leave the layer that comes out with values of its own."""
    return _with_other_parameters(target, mutant, trace, lambda parameter: torch.randn_like(parameter) * 0.02)


def _with_other_parameters(target: Any, mutant: Mutant, trace: Trace, other: Any) -> Any:
    def around(call: Call) -> Any:
        layer = call.run()
        if not isinstance(layer, nn.Module):
            raise trace.is_gone(f"{mutant.at} gives no layer. Next step: point the mutant at what builds one.")
        for holder in layer.modules():
            for name, parameter in list(holder._parameters.items()):
                if parameter is not None:
                    holder._parameters[name] = nn.Parameter(other(parameter))
                    trace.note_use()
        return layer

    return around_calls(target, around)


@contextmanager
def _with_parameters(layer: Any, others: dict[str, Any]) -> Iterator[None]:
    """A layer with other tensors in the place of parameters, for one call."""
    kept = {name: layer._parameters[name] for name in others}
    layer._parameters.update(others)
    try:
        yield
    finally:
        layer._parameters.update(kept)
