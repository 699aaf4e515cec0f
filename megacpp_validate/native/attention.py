"""Scaled dot-product attention: grouped queries, causal, packed documents, local window, soft cap.

Sources: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023, arXiv:2305.13245; soft cap:
Gemma 2, arXiv:2408.00118.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from .norms import without_autocast

# --- rope ---
# Rotary position embedding.


def rope_tables(
    length: int, head_dim: int, *, base: float = 10000.0, device: Any = None, dtype: Any = torch.float32
) -> tuple[Any, Any]:
    """Cosine and sine of every position's angles.

    Args:
        length: positions T, from 0.
        head_dim: D, even.
        base: of the wave lengths.
        device: where the tables lie.
        dtype: of the tables; fp64 where they serve as a reference.

    Returns:
        (cos, sin), each [T, D/2]. Angles are formed in fp64: in fp32 an angle of 10^5 would be off by 4e-3.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float64)
    angles = torch.outer(positions, base**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Any, cos: Any, sin: Any) -> Any:
    """Turn each pair of channels by the angle of its position.

    Args:
        x: [B, H, T, D], any floating dtype and strides.
        cos, sin: [at least T, D/2], from `rope_tables`.

    Returns:
        [B, H, T, D] in the dtype of `x`, computed in the wider dtype of `x` and the tables.
    """
    length = x.shape[-2]
    cos, sin = cos[:length], sin[:length]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


# --- attention ---


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    doc_ids: Any | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Any:
    """Attention by SDPA; with a soft cap, which SDPA cannot express, written out. An autocast region changes nothing.

    Args:
        query: [B, H, T, D], any floating dtype and strides.
        key, value: [B, G, T, D], in the dtype of `query`; G divides H, and H/G neighbouring query heads share a group.
        causal: no query sees a later key.
        scale: factor on the scores; None is 1 / sqrt(D).
        doc_ids: [B, T] integers of packed documents: a query sees the keys of its own document only.
        window: each query sees itself and the `window - 1` keys before it; needs `causal`.
        softcap: scores s become softcap x tanh(s / softcap), after scaling.

    Returns:
        [B, H, T, D] in the dtype of `query`.
    """
    length = query.shape[2]
    if doc_ids is None and softcap is None and (window is None or window >= length):
        return masked_attention(query, key, value, None, causal=causal, scale=scale)
    mask = attention_mask(length, causal=causal, doc_ids=doc_ids, window=window, device=query.device)
    if softcap is None:
        return masked_attention(query, key, value, mask, scale=scale)
    return capped_attention(query, key, value, mask, softcap=softcap, scale=scale)


def masked_attention(
    query: Any, key: Any, value: Any, mask: Any, *, causal: bool = False, scale: float | None = None
) -> Any:
    """SDPA under a mask, bool [.., T, T] or None, with its groups spelled so that a fused kernel can take them.

    FlashAttention takes groups, but neither a mask nor fp32; the memory-efficient kernel takes both, and groups not in
    every release of PyTorch (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Where it declines, SDPA falls to
    the unfused path without a word, so groups are repeated for it.
    """
    repeats = query.shape[1] // key.shape[1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    grouped = repeats > 1 and mask is None and half
    if repeats > 1 and not grouped:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    with without_autocast(query):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )


def attention_mask(
    length: int, *, causal: bool = True, doc_ids: Any | None = None, window: int | None = None, device: Any = None
) -> Any:
    """Which query may see which key.

    Args:
        length: queries and keys T.
        causal, doc_ids, window: as `attention` takes them.
        device: of the mask; that of `doc_ids` where there are some.

    Returns:
        Boolean, True where it sees: [T, T], or [B, 1, T, T] with documents.
    """
    if doc_ids is not None:
        device = doc_ids.device
    columns = torch.arange(length, device=device)[None, :]
    rows = columns.T
    mask = columns <= rows if causal else torch.ones(length, length, dtype=torch.bool, device=device)
    if window is not None:
        mask = mask & (columns > rows - window)
    if doc_ids is not None:
        mask = mask & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    return mask


def capped_attention(query: Any, key: Any, value: Any, mask: Any, *, softcap: float, scale: float | None = None) -> Any:
    """Attention with a soft cap under a mask, bool [.., T, T], written out; it holds [B, H, T, T] scores.

    Computed in fp32, or in fp64 where the input is fp64, and rounded once, also inside an autocast region.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    keys, values = (one.to(wide).repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))
    with without_autocast(query):
        scores = softcap * torch.tanh((query.to(wide) * factor) @ keys.transpose(-1, -2) / softcap)
        return (scores.masked_fill(~mask, -math.inf).softmax(dim=-1) @ values).to(query.dtype)
