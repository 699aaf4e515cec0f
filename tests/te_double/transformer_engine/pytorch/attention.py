"""`DotProductAttention`."""

from __future__ import annotations

import math
from typing import Any

import torch

from .gemm import Mark
from .layer import DTYPES, TransformerEngineBaseModule, check_alone


class FusedAttnFunc(Mark):
    """The name that the graph shows."""


class ScaledUpperTriangMaskedSoftmax(Mark):
    """The name that the graph shows of what is not fused."""


class FusedAttention(torch.nn.Module):
    """By cuDNN: what the graph shows of it."""

    def forward(self, rows: Any) -> Any:
        """Rows as they are."""
        return FusedAttnFunc.apply(rows)


class UnfusedDotProductAttention(torch.nn.Module):
    """By matrix products and a softmax: what the graph shows of it."""

    def forward(self, rows: Any) -> Any:
        """Rows as they are."""
        return ScaledUpperTriangMaskedSoftmax.apply(rows)


class DotProductAttention(TransformerEngineBaseModule):
    """Query [B, T, H, D], key and value [B, S, G, D] ("bshd"; "sbhd" likewise) -> [B, T, H * D]."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        **alone: Any,
    ) -> None:
        check_alone(alone)
        super().__init__(num_gemms=0)
        self.heads = num_attention_heads
        self.groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if self.heads % self.groups:
            raise AssertionError("The number of attention heads must be divisible by the number of GQA groups!")
        width = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale
        self.attention_dropout = attention_dropout
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.fused_attention, self.unfused_attention = FusedAttention(), UnfusedDotProductAttention()

    def is_fused(self, query_layer: Any, key_layer: Any) -> bool:
        """Whether cuDNN takes it: half precision, however many groups."""
        return query_layer.dtype != torch.float32 and key_layer.dtype == query_layer.dtype

    def forward(
        self,
        query_layer: Any,
        key_layer: Any,
        value_layer: Any,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        **alone: Any,
    ) -> Any:
        """Heads in the layout of `qkv_format` -> the same layout with heads joined."""
        check_alone(alone)
        for tensor in (query_layer, key_layer, value_layer):
            if tensor.dim() != 4 or tensor.dtype not in DTYPES or tensor.dtype != query_layer.dtype:
                raise AssertionError(f"Queries, keys and values must be 4D tensors of one dtype, not {tensor.shape}")
        if query_layer.shape[2] != self.heads or key_layer.shape[2] != self.groups:
            raise AssertionError(
                f"Keys and values must have num_gqa_group = {self.groups} heads! Found {key_layer.shape[2]}."
            )
        mask = attn_mask_type or self.attn_mask_type
        if mask not in ("causal", "no_mask") or window_size not in (None, (-1, 0 if mask == "causal" else -1)):
            raise NotImplementedError(f"the double of Transformer Engine has no mask {mask!r} in {window_size}")
        form = qkv_format or self.qkv_format
        if form not in ("bshd", "sbhd"):
            raise NotImplementedError(f"the double of Transformer Engine has no layout {form!r}")
        order = (0, 2, 1, 3) if form == "bshd" else (1, 2, 0, 3)
        query, key, value = (tensor.permute(order) for tensor in (query_layer, key_layer, value_layer))
        out = self._attend(query, key, value, causal=mask == "causal")
        out = out.permute((0, 2, 1, 3) if form == "bshd" else (2, 0, 1, 3))
        kernel = self.fused_attention if self.is_fused(query_layer, key_layer) else self.unfused_attention
        return kernel(out.reshape(*out.shape[:2], -1))

    def _attend(self, query: Any, key: Any, value: Any, *, causal: bool) -> Any:
        """[B, H, T, D], [B, G, S, D] -> [B, H, T, D]; scores and sums in fp32, weights in the dtype of the query."""
        share = self.heads // self.groups
        key, value = (tensor.float().repeat_interleave(share, dim=1) for tensor in (key, value))
        scores = self.softmax_scale * (query.float() @ key.transpose(-1, -2))
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        weights = torch.nn.functional.dropout(scores.softmax(-1), self.attention_dropout, training=self.training)
        return (weights.to(query.dtype).float() @ value).to(query.dtype)
