"""TE layer-spec dispatcher: which TE class, if any, stands for each layer kind; the TE side of it."""

from __future__ import annotations

from typing import Any

from . import imports as te

NATIVE_PATH = "the native layer of each kind"


def te_layer_spec() -> dict[str, type | None]:
    """Layer kind -> TE class, None where TE has nothing for it."""
    return {
        "A": te.transformer_layer(),
        "M": te.layernorm_linear(),
        "E": te.grouped_linear(),
        "R": None,
        "MLP": te.layernorm_mlp(),
        "norm": te.rmsnorm(),
        "head": None,
    }


def te_norm(hidden: int, *, eps: float, dtype: Any, device: Any) -> Any:
    """RMSNorm over the last axis: [..., hidden] -> [..., hidden]."""
    return te.rmsnorm.require()(hidden, eps=eps, dtype=dtype, device=device)


def te_mamba_in_projection(hidden: int, width: int, *, eps: float, dtype: Any, device: Any) -> Any:
    """The Mamba in-projection with its norm fused: [..., hidden] -> [..., width]."""
    return te.layernorm_linear.require()(
        in_features=hidden,
        out_features=width,
        eps=eps,
        bias=False,
        normalization="RMSNorm",
        zero_centered_gamma=False,
        params_dtype=dtype,
        device=device,
    )


def te_attention_layer(
    *, hidden: int, ffn_hidden: int, num_heads: int, num_gqa_groups: int, layer_number: int, dtype: Any, device: Any
) -> Any:
    """A whole attention layer with its MLP: [B, T, hidden] -> [B, T, hidden]."""
    return te.transformer_layer.require()(
        hidden,
        ffn_hidden,
        num_heads,
        num_gqa_groups=num_gqa_groups,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layer_number=layer_number,
        self_attn_mask_type="causal",
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        fuse_qkv_params=True,
        attn_input_format="bshd",
        params_dtype=dtype,
        device=device,
    )
