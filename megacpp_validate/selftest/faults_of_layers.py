"""Faults in a layer: its bias, halves, experts, order of steps; and plain torch under the vendor's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from ..bridge.te_fp8 import te_scope, te_state
from ..evidence.selftest import Mutant
from ..native.attention import apply_rope, attention
from ..native.grouped_gemm import grouped_gemm_loop
from ..native.mlp import activation, gated_activation, is_gated
from ..native.norms import layer_norm, rms_norm
from .points import Call, PlantPointGone, Trace, around_calls, subclass


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


# --- a silent fallback: plain torch under the vendor's name -----------------------------------------------------------


def plant_native_instead(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """The same entry point, computed by plain torch."""
    native = _NATIVE.get(mutant.at)
    if native is None:
        raise PlantPointGone(f"there is no plain torch in the place of {mutant.at}; there is for {', '.join(_NATIVE)}")

    def around(call: Call) -> Any:
        trace.note_use()
        return native(call)

    made = around_calls(target, around)
    # Whoever looks for the vendor's layers by their module must not find one.
    return subclass(made, {}, module=__name__) if isinstance(made, type) else made


def _weight(layer: Any) -> Any:
    names = getattr(layer, "weight_names", ["weight"])
    return torch.cat([getattr(layer, name) for name in names])


def _bias(layer: Any, name: str = "bias") -> Any:
    bias = getattr(layer, name, None)
    return bias if bias is not None and bias.numel() else None


def _normed(layer: Any, rows: Any) -> Any:
    if layer.normalization == "RMSNorm":
        return rms_norm(rows, layer.layer_norm_weight, eps=layer.eps)
    return layer_norm(rows, layer.layer_norm_weight, layer.layer_norm_bias, eps=layer.eps)


def _linear(call: Call) -> Any:
    return functional.linear(call.arguments["inp"], _weight(call.owner), _bias(call.owner))


def _layernorm_linear(call: Call) -> Any:
    return functional.linear(_normed(call.owner, call.arguments["inp"]), _weight(call.owner), _bias(call.owner))


def _layernorm_mlp(call: Call) -> Any:
    layer = call.owner
    rows = functional.linear(_normed(layer, call.arguments["inp"]), layer.fc1_weight, _bias(layer, "fc1_bias"))
    act: Callable[..., Any] = gated_activation if is_gated(layer.activation) else activation
    return functional.linear(act(rows, layer.activation), layer.fc2_weight, _bias(layer, "fc2_bias"))


def _grouped_linear(call: Call) -> Any:
    layer, splits = call.owner, call.arguments["m_splits"]
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
    weights = torch.stack([getattr(layer, f"weight{expert}") for expert in range(layer.num_gemms)])
    return grouped_gemm_loop(call.arguments["inp"], weights, counts)


def _dot_product_attention(call: Call) -> Any:
    given = call.arguments
    heads = [given[name].transpose(1, 2) for name in ("query_layer", "key_layer", "value_layer")]
    mask = given["attn_mask_type"] or "causal"
    out = attention(*heads, causal=mask != "no_mask", scale=getattr(call.owner, "softmax_scale", None))
    return out.transpose(1, 2).flatten(2)


def _rmsnorm(call: Call) -> Any:
    given = call.arguments
    rows = given["inp"] if "inp" in given else given["input"]
    return rms_norm(rows, call.owner.weight, eps=call.owner.eps)


_NATIVE: Final[dict[str, Callable[[Call], Any]]] = {
    "linear": _linear,
    "layernorm_linear": _layernorm_linear,
    "layernorm_mlp": _layernorm_mlp,
    "grouped_linear": _grouped_linear,
    "dot_product_attention": _dot_product_attention,
    "rmsnorm": _rmsnorm,
}
