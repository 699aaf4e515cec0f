"""The TE side of the layer-spec dispatcher: which TE class stands for each layer kind, and how each is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from . import imports as te
from .features import PRODUCTION, Features, why_not_te

Kind = Literal["A", "M", "E", "R", "MLP", "norm", "head"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

FEATURE_OF: Final[Mapping[Kind, str]] = {
    "A": "native_block", "M": "mamba_in_projection", "E": "expert_gemm", "MLP": "mlp", "norm": "norm",
}  # fmt: skip
"""Kind -> the feature that lets it take TE; those that TE has nothing for are not in it."""

# What TE's LayerNormMLP has in every release from 2.12 on; "glu" came with 2.13.
MlpActivation = Literal["gelu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu"]


def te_classes() -> dict[Kind, type | None]:
    """Layer kind -> TE class, whatever features are on; None where TE has nothing for it, or cannot be used."""
    return {
        "A": te.transformer_layer(),
        "M": te.layernorm_linear(),
        "E": te.grouped_linear(),
        "R": None,
        "MLP": te.layernorm_mlp(),
        "norm": te.rmsnorm(),
        "head": None,
    }


def te_layer_spec(features: Features = PRODUCTION) -> dict[str, type | None]:
    """Layer kind -> TE class; None where TE has nothing for it, or the feature is off."""
    return {kind: found if _is_on(features, kind) else None for kind, found in te_classes().items()}


def _is_on(features: Features, kind: Kind) -> bool:
    return kind in FEATURE_OF and why_not_te(features, FEATURE_OF[kind], "cuda") is None


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


def te_mlp(hidden: int, ffn_hidden: int, *, activation: MlpActivation, eps: float, dtype: Any, device: Any) -> Any:
    """Norm and MLP as one layer: [..., hidden] -> [..., hidden]."""
    return te.layernorm_mlp.require()(
        hidden_size=hidden,
        ffn_hidden_size=ffn_hidden,
        eps=eps,
        bias=False,
        normalization="RMSNorm",
        activation=activation,
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
