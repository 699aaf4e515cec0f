"""A silent fallback: the vendor's name and parameters, and plain torch inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

from ...evidence.selftest import Mutant
from ...native.attention import attention
from ...native.grouped_gemm import grouped_gemm_loop
from ...native.mlp import activation, gated_activation, is_gated
from ...native.norms import layer_norm, rms_norm
from ..trace import PlantPointGone, Trace
from .calls import Call, around_calls, subclass


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
