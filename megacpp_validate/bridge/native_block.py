"""TE native block wrapper: LayerNormLinear, DotProductAttention, Linear, LayerNormMLP; the TE side of it."""

from __future__ import annotations

from typing import Any, Literal

from . import imports as te

NATIVE_PATH = "the native A-block of plain torch layers"


class TeBlock:
    """The A-block in TE classes, in the order above.

    Args:
        hidden: width D of the residual stream.
        ffn_hidden: width of the MLP.
        num_heads, head_dim, num_gqa_groups: of the attention.
        activation: "swiglu" for a gated MLP, "gelu" for a plain one.
        eps: of both norms.
        dtype, device: of the parameters.
    """

    def __init__(
        self,
        *,
        hidden: int,
        ffn_hidden: int,
        num_heads: int,
        head_dim: int,
        num_gqa_groups: int,
        activation: Literal["gelu", "swiglu"],
        eps: float,
        dtype: Any,
        device: Any,
    ) -> None:
        self.heads = num_heads, num_gqa_groups, head_dim
        self.qkv = te.layernorm_linear.require()(
            in_features=hidden,
            out_features=(num_heads + 2 * num_gqa_groups) * head_dim,
            eps=eps,
            bias=False,
            normalization="RMSNorm",
            parameters_split={
                "query": num_heads * head_dim,
                "key": num_gqa_groups * head_dim,
                "value": num_gqa_groups * head_dim,
            },
            params_dtype=dtype,
            device=device,
        )
        self.attention = te.dot_product_attention.require()(
            num_attention_heads=num_heads,
            kv_channels=head_dim,
            num_gqa_groups=num_gqa_groups,
            qkv_format="bshd",
            attn_mask_type="causal",
        )
        self.out = te.linear.require()(
            in_features=num_heads * head_dim, out_features=hidden, bias=False, params_dtype=dtype, device=device
        )
        self.mlp = te.layernorm_mlp.require()(
            hidden_size=hidden,
            ffn_hidden_size=ffn_hidden,
            eps=eps,
            bias=False,
            normalization="RMSNorm",
            activation=activation,
            params_dtype=dtype,
            device=device,
        )

    def __call__(self, rows: Any, *, is_first_microbatch: bool | None = None) -> Any:
        """Residual stream [B, T, D] -> [B, T, D]."""
        heads, groups, width = self.heads
        mixed = self.qkv(rows, is_first_microbatch=is_first_microbatch)
        query, key, value = mixed.split([heads * width, groups * width, groups * width], dim=-1)
        shape = (*rows.shape[:2], -1, width)
        seen = self.attention(query.reshape(shape), key.reshape(shape), value.reshape(shape))
        rows = rows + self.out(seen, is_first_microbatch=is_first_microbatch)
        return rows + self.mlp(rows, is_first_microbatch=is_first_microbatch)

    def parameters(self) -> dict[str, Any]:
        """The block's weights by role; biases are off."""
        return {
            "attention.norm": self.qkv.layer_norm_weight,
            "attention.query": self.qkv.query_weight,
            "attention.key": self.qkv.key_weight,
            "attention.value": self.qkv.value_weight,
            "attention.out": self.out.weight,
            "mlp.norm": self.mlp.layer_norm_weight,
            "mlp.up": self.mlp.fc1_weight,
            "mlp.down": self.mlp.fc2_weight,
        }
