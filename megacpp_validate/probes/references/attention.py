"""Attention in fp64, one head after the other, and which key each query sees, one condition after the other.

Source: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: arXiv:2305.13245; soft cap: arXiv:2408.00118; block
routing: arXiv:2502.13189.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def visible(
    batch: int,
    heads: int,
    length: int,
    *,
    causal: bool = True,
    doc_ids: Any = None,
    window: int | None = None,
    block_mask: Any = None,
    block_size: int = 1,
    device: Any = None,
) -> Any:
    """Which key each query sees, [B, H, T, T] bool.

    Args:
        batch, heads, length: B, H and T.
        causal: key j <= query i.
        doc_ids: [B, T]; of one document.
        window: j > i - window.
        block_mask: [B or 1, H or 1, blocks, blocks]; the block of j is routed to the block of i.
        block_size: tokens in a block.
        device: of the mask.
    """
    place = torch.arange(length, device=device)
    query, key = place[:, None], place[None, :]
    seen = torch.ones(batch, heads, length, length, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= key > query - window
    if doc_ids is not None:
        seen &= (doc_ids[:, :, None] == doc_ids[:, None, :])[:, None]
    if block_mask is not None:
        seen &= block_mask[:, :, query // block_size, key // block_size]
    return seen


def attend(
    query: Any, key: Any, value: Any, seen: Any, *, scale: float | None = None, softcap: float | None = None
) -> Any:
    """Attention, head by head; differentiable.

    Args:
        query: [B, H, T, D], fp64.
        key, value: [B, G, T, D]; query head h uses group h // (H / G).
        seen: [B, H, T, T] bool.
        scale: factor on the scores; None is 1 / sqrt(D).
        softcap: scores s become softcap * tanh(s / softcap).

    Returns:
        [B, H, T, D]; a row that sees nothing is zero.
    """
    heads, share = query.shape[1], query.shape[1] // key.shape[1]
    factor = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    out = []
    for head in range(heads):
        group = head // share
        scores = factor * torch.einsum("btd,bsd->bts", query[:, head], key[:, group])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        sees = seen[:, head]
        top = scores.detach().masked_fill(~sees, -math.inf).amax(-1, keepdim=True).clamp_min(-1e300)
        raised = torch.where(sees, (scores - top).clamp_max(0.0).exp(), 0.0)
        total = raised.sum(-1, keepdim=True)
        weights = raised / torch.where(total > 0, total, 1.0)
        out.append(torch.einsum("bts,bsd->btd", weights, value[:, group]))
    return torch.stack(out, dim=1)
