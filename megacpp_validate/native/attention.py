"""Scaled dot-product attention: grouped queries, causal, packed documents, local window, soft cap.

`attention` is what trains; `reference_attention` is the same written out, without SDPA, and what parity is held to.

Sources: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023, arXiv:2305.13245; soft cap:
Gemma 2, arXiv:2408.00118; alignment of the causal mask: FlashAttention 2.1 (Transformer Engine's
`causal_bottom_right`).
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
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(
            f"a rotary embedding turns pairs of channels, and a head size of {head_dim} has none to pair; "
            f"use an even head size."
        )
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
    length, width = x.shape[-2], x.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[1] != width:
        raise ValueError(
            f"rotary tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)} do not fit heads of size {width}: each "
            f"must be [T, {width // 2}]. Make them with rope_tables(length, {width})."
        )
    if length > cos.shape[0]:
        raise ValueError(
            f"positions 0 to {length - 1} are asked for, and the rotary tables hold {cos.shape[0]} from 0. Make them "
            "for the longest sequence."
        )
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
        key, value: [B, G, S, D], in the dtype of `query`; G divides H, and H/G neighbouring query heads share a group.
        causal: no query sees a later key. Where S differs from T the last query is aligned with the last key.
        scale: factor on the scores; None is 1 / sqrt(D).
        doc_ids: [B, T] integers of packed documents, with S = T: a query sees the keys of its own document only.
        window: each query sees itself and the `window - 1` keys before it; needs `causal`.
        softcap: scores s become softcap x tanh(s / softcap), after scaling.

    Returns:
        [B, H, T, D] in the dtype of `query`. A row that sees no key is zero, and so are its gradients.

    Raises:
        ValueError: shapes, groups or options that do not fit together.
    """
    check_attention(query, key, value, causal=causal, doc_ids=doc_ids, window=window, softcap=softcap)
    length, key_length = query.shape[2], key.shape[2]
    if softcap is not None or key_length == 0:
        return reference_attention(
            query, key, value, causal=causal, scale=scale, doc_ids=doc_ids, window=window, softcap=softcap
        )
    if causal and length > key_length:
        # The first rows lie before every key. SDPA's backends disagree on rows that see nothing, so it gets none.
        seen = attention(query[:, :, length - key_length :], key, value, scale=scale, window=window)
        return functional.pad(seen, (0, 0, length - key_length, 0))
    if window is not None and window >= key_length:
        window = None
    plain = doc_ids is None and window is None
    square = causal and plain and length == key_length
    # One query that is aligned with the last key sees them all.
    unmasked = plain and (not causal or length == 1)
    mask = None
    if not (square or unmasked):
        mask = attention_mask(length, key_length, causal=causal, doc_ids=doc_ids, window=window, device=query.device)
    return _sdpa(query, key, value, mask, causal=square and length > 1, scale=scale)


def _sdpa(query: Any, key: Any, value: Any, mask: Any, *, causal: bool, scale: float | None) -> Any:
    """SDPA with its groups spelled so that a fused kernel can take them.

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
    length: int,
    key_length: int,
    *,
    causal: bool = True,
    doc_ids: Any | None = None,
    window: int | None = None,
    device: Any = None,
) -> Any:
    """Which query may see which key.

    Args:
        length: queries T.
        key_length: keys S; query t is aligned with key t + S - T.
        causal, doc_ids, window: as `attention` takes them.
        device: of the mask; that of `doc_ids` where there are some.

    Returns:
        Boolean, True where it sees: [T, S], or [B, 1, T, S] with documents.
    """
    if doc_ids is not None:
        device = doc_ids.device
    rows = torch.arange(key_length - length, key_length, device=device)[:, None]
    columns = torch.arange(key_length, device=device)[None, :]
    mask = columns <= rows if causal else torch.ones(length, key_length, dtype=torch.bool, device=device)
    if window is not None:
        mask = mask & (columns > rows - window)
    if doc_ids is not None:
        mask = mask & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    return mask


def reference_attention(
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
    """Attention written out, with nothing fused; arguments and result as `attention`.

    Computed in fp32, or in fp64 where the input is fp64, and rounded once, also inside an autocast region. It holds
    [B, H, T, S] scores.
    """
    check_attention(query, key, value, causal=causal, doc_ids=doc_ids, window=window, softcap=softcap)
    batch, heads, length, width = query.shape
    groups, key_length = key.shape[1], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = 1.0 / math.sqrt(width) if scale is None else scale
    # Heads by group, [B, G, H/G, T, D], so that keys and values need no copies.
    rows = query.to(wide).unflatten(1, (groups, heads // groups))
    keys, values = key.to(wide).unsqueeze(2), value.to(wide).unsqueeze(2)
    mask = attention_mask(length, key_length, causal=causal, doc_ids=doc_ids, window=window, device=query.device)
    if doc_ids is not None:
        mask = mask.unsqueeze(2)
    with without_autocast(query):
        scores = (rows * factor) @ keys.transpose(-1, -2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = _masked_softmax(scores, mask)
        return (weights @ values).reshape(batch, heads, length, width).to(query.dtype)


def _masked_softmax(scores: Any, mask: Any) -> Any:
    """Softmax over the keys that are seen, [..., T, S]; zeros, in value and gradient, for a row that sees none."""
    blind = ~mask.any(dim=-1, keepdim=True)
    # A row that sees none is let see all, so that it has a finite gradient, and is zeroed afterwards.
    weights = scores.masked_fill(~(mask | blind), -math.inf).softmax(dim=-1)
    return weights.masked_fill(blind, 0.0)


def check_attention(
    query: Any, key: Any, value: Any, *, causal: bool, doc_ids: Any | None, window: int | None, softcap: float | None
) -> None:
    """Refuse shapes and options that no attention can be computed of (ValueError)."""
    shape = query.shape
    fits = query.dim() == key.dim() == 4 and key.shape == value.shape and key.shape[0] == shape[0]
    if not fits or key.shape[3] != shape[3] or key.shape[1] == 0 or shape[1] % key.shape[1]:
        raise ValueError(
            f"attention takes query [B, H, T, D] and key and value [B, G, S, D], where G divides H, and got query "
            f"{tuple(shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; transpose(1, 2) puts heads first."
        )
    if (window is not None and (window < 1 or not causal)) or (softcap is not None and softcap <= 0):
        raise ValueError(
            f"a window of {window} with causal={causal}, a soft cap of {softcap}: a window is 1 or more, its own key "
            "included, and needs causal=True; a soft cap is positive; None is none."
        )
    if doc_ids is not None and (tuple(doc_ids.shape) != (shape[0], shape[2]) or key.shape[2] != shape[2]):
        raise ValueError(
            f"document ids {tuple(doc_ids.shape)} for {shape[2]} queries and {key.shape[2]} keys: they are [B, T] = "
            f"{(shape[0], shape[2])}, and there are as many keys as queries."
        )
