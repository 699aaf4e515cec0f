"""`DotProductAttention`."""

from __future__ import annotations

import math
from typing import Any

import torch

from .gemm import Mark
from .layer import DTYPES, TransformerEngineBaseModule, only_defaults


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


def allowed(queries: int, keys: int, window: tuple[int, int], bottom_right: bool, device: Any) -> Any:
    """Which key [S] each query [T] sees: at most window[0] before it and window[1] after it, -1 is no limit."""
    place = torch.arange(queries, device=device)[:, None] + (keys - queries if bottom_right else 0)
    distance = torch.arange(keys, device=device)[None, :] - place
    left, right = window
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


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
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        done = ("num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type", "window_size",
                "bottom_right_diagonal", "softcap", "softmax_scale", "layer_number", "name")  # fmt: skip
        only_defaults(DotProductAttention.__init__, locals(), done)
        super().__init__(num_gemms=0)
        self.heads = num_attention_heads
        self.groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if self.heads % self.groups:
            raise AssertionError("The number of attention heads must be divisible by the number of GQA groups!")
        width = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale
        self.attention_dropout = attention_dropout
        self.qkv_format, self.attn_mask_type, self.softcap = qkv_format, attn_mask_type, softcap
        self.window_size, self.bottom_right_diagonal = window_size, bottom_right_diagonal
        self.fused_attention, self.unfused_attention = FusedAttention(), UnfusedDotProductAttention()

    def is_fused(self, query_layer: Any, key_layer: Any) -> bool:
        """Whether cuDNN takes it: half precision, however many groups."""
        return query_layer.dtype != torch.float32 and key_layer.dtype == query_layer.dtype

    def forward(
        self,
        query_layer: Any = None,
        key_layer: Any = None,
        value_layer: Any = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv_padded: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Any = None,
        alibi_slopes: Any = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
    ) -> Any:
        """Heads in the layout of `qkv_format` -> the same layout with heads joined."""
        done = ("query_layer", "key_layer", "value_layer", "qkv_format", "attn_mask_type", "window_size",
                "bottom_right_diagonal", "softcap", "fast_zero_fill")  # fmt: skip
        only_defaults(DotProductAttention.forward, locals(), done)
        for tensor in (query_layer, key_layer, value_layer):
            if tensor.dim() != 4 or tensor.dtype not in DTYPES or tensor.dtype != query_layer.dtype:
                raise AssertionError(f"Queries, keys and values must be 4D tensors of one dtype, not {tensor.shape}")
        if query_layer.shape[2] != self.heads or key_layer.shape[2] != self.groups:
            raise AssertionError(
                f"Keys and values must have num_gqa_group = {self.groups} heads! Found {key_layer.shape[2]}."
            )
        mask = attn_mask_type or self.attn_mask_type
        if mask not in ("causal", "causal_bottom_right", "no_mask"):
            raise NotImplementedError(f"the double of Transformer Engine has no mask {mask!r}")
        window = window_size or self.window_size or ((-1, 0) if mask != "no_mask" else (-1, -1))
        if mask != "no_mask" and window[1] not in (-1, 0):
            raise AssertionError(f"window_size {window} is not causal")
        window = (window[0], 0) if mask != "no_mask" else window
        corner = bottom_right_diagonal if bottom_right_diagonal is not None else self.bottom_right_diagonal
        corner = mask != "causal" if corner is None else corner
        form = qkv_format or self.qkv_format
        if form not in ("bshd", "sbhd"):
            raise NotImplementedError(f"the double of Transformer Engine has no layout {form!r}")
        order = (0, 2, 1, 3) if form == "bshd" else (1, 2, 0, 3)
        query, key, value = (tensor.permute(order) for tensor in (query_layer, key_layer, value_layer))
        seen = allowed(query.shape[2], key.shape[2], window, corner, query.device)
        out = self._attend(query, key, value, seen, self.softcap if softcap is None else softcap)
        out = out.permute((0, 2, 1, 3) if form == "bshd" else (2, 0, 1, 3))
        kernel = self.fused_attention if self.is_fused(query_layer, key_layer) else self.unfused_attention
        return kernel(out.reshape(*out.shape[:2], -1))

    def _attend(self, query: Any, key: Any, value: Any, seen: Any, softcap: float) -> Any:
        """[B, H, T, D], [B, G, S, D] -> [B, H, T, D]; scores and sums in fp32, weights in the dtype of the query."""
        share = self.heads // self.groups
        key, value = (tensor.float().repeat_interleave(share, dim=1) for tensor in (key, value))
        scores = self.softmax_scale * (query.float() @ key.transpose(-1, -2))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
        weights = torch.nn.functional.dropout(weights, self.attention_dropout, training=self.training)
        return (weights.to(query.dtype).float() @ value).to(query.dtype)
