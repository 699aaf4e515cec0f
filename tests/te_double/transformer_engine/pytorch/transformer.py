"""`TransformerLayer`."""

from __future__ import annotations

from typing import Any

import torch

from .attention import DotProductAttention
from .layernorm_mlp import LayerNormMLP
from .linear import LayerNormLinear, Linear


class MultiheadAttention(torch.nn.Module):
    """Norm and projection, attention, projection. Rows of the first weight lie interleaved by group, as TE's."""

    def __init__(
        self, hidden: int, heads: int, groups: int, width: int, eps: float, norm: str, bias: bool, fused: bool,
        interleaved: bool, form: str, mask: str, dropout: float, dtype: Any, device: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.groups, self.width, self.interleaved = heads, groups, width, interleaved
        made = {"bias": bias, "params_dtype": dtype, "device": device}
        widths = {"query": heads * width, "key": groups * width, "value": groups * width}
        split = None if fused else widths
        self.layernorm_qkv = LayerNormLinear(
            hidden, sum(widths.values()), eps=eps, normalization=norm, parameters_split=split, **made
        )
        self.core_attention = DotProductAttention(
            heads, width, num_gqa_groups=groups, attention_dropout=dropout, qkv_format=form, attn_mask_type=mask
        )
        self.proj = Linear(heads * width, hidden, **made)

    def forward(self, rows: Any, is_first_microbatch: bool | None = None) -> Any:
        """[B, T, hidden] -> [B, T, hidden]."""
        mixed = self.layernorm_qkv(rows, is_first_microbatch=is_first_microbatch)
        share = self.heads // self.groups
        order = (self.groups, share + 2) if self.interleaved else (share + 2, self.groups)
        parts = mixed.view(*rows.shape[:2], *order, self.width)
        query, key, value = parts.split([share, 1, 1], dim=-2 if self.interleaved else -3)
        query, key, value = (part.reshape(*rows.shape[:2], -1, self.width) for part in (query, key, value))
        seen = self.core_attention(query, key, value)
        return self.proj(seen, is_first_microbatch=is_first_microbatch)


class TransformerLayer(torch.nn.Module):
    """Attention and MLP with their norms and residuals: [B, T, hidden] -> [B, T, hidden]."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int,
        num_gqa_groups: int | None = None, layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1, layer_number: int | None = None, kv_channels: int | None = None,
        self_attn_mask_type: str = "causal", params_dtype: Any = None, fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True, bias: bool = True, activation: str = "gelu",
        normalization: str = "LayerNorm", device: Any = "cuda", attn_input_format: str = "sbhd",
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, num_gqa_groups or num_attention_heads,
            kv_channels or hidden_size // num_attention_heads, layernorm_epsilon, normalization, bias, fuse_qkv_params,
            fuse_qkv_params and qkv_weight_interleaved, attn_input_format, self_attn_mask_type,
            attention_dropout, params_dtype, device,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, bias=bias, normalization=normalization,
            activation=activation, params_dtype=params_dtype, device=device,
        )  # fmt: skip

    def forward(self, hidden_states: Any, is_first_microbatch: bool | None = None) -> Any:
        """[B, T, hidden] -> [B, T, hidden]."""
        attended = self.self_attention(hidden_states, is_first_microbatch=is_first_microbatch)
        rows = hidden_states + self._dropped(attended)
        return rows + self._dropped(self.layernorm_mlp(rows, is_first_microbatch=is_first_microbatch))

    def _dropped(self, rows: Any) -> Any:
        return torch.nn.functional.dropout(rows, self.hidden_dropout, training=self.training)
