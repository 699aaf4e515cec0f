"""TE attention wrapper: the TE side of it."""

from __future__ import annotations

from typing import Any, Literal

from . import imports as te

NATIVE_PATH = "torch.nn.functional.scaled_dot_product_attention"


class TeAttention:
    """Scaled dot-product attention by Transformer Engine; RoPE is applied before the call.

    Args:
        num_heads: query heads H.
        head_dim: D.
        num_gqa_groups: key and value heads; divides H.
        softmax_scale: factor on the scores; None is 1 / sqrt(D).
        dropout: probability on the attention weights.
        tp_size, tp_group: tensor parallelism over heads.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_gqa_groups: int,
        softmax_scale: float | None = None,
        dropout: float = 0.0,
        tp_size: int = 1,
        tp_group: Any = None,
    ) -> None:
        self.inner = te.dot_product_attention.require()(
            num_attention_heads=num_heads,
            kv_channels=head_dim,
            num_gqa_groups=num_gqa_groups,
            attention_dropout=dropout,
            qkv_format="bshd",
            attn_mask_type="causal",
            attention_type="self",
            softmax_scale=softmax_scale,
            tp_size=tp_size,
            tp_group=tp_group,
        )

    def __call__(self, query: Any, key: Any, value: Any, *, mask: Literal["causal", "no_mask"] = "causal") -> Any:
        """Query [B, H, T, D], key and value [B, G, T, D] -> [B, H, T, D]."""
        batch, heads, length, width = query.shape
        rows = self.inner(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            qkv_format="bshd",
            attn_mask_type=mask,
            window_size=(-1, 0) if mask == "causal" else (-1, -1),
            core_attention_bias_type="no_bias",
        )
        return rows.view(batch, length, heads, width).transpose(1, 2)
