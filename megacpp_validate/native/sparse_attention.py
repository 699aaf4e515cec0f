"""Attention over a part of the past, in plain PyTorch: the sampled tokens of DSA, and the routed blocks of MoBA.

Sources: DeepSeek sparse attention (DSA): DeepSeek-V3.2, arXiv:2512.02556, section 2.1; mixture of block attention
(MoBA): Lu et al. 2025, arXiv:2502.13189, section 2.2. Scores of both are computed in fp32 at least, also inside an
autocast region.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from .attention import apply_rope, attention_mask
from .block import ABlock
from .mamba import at_least_fp32, split_chunks
from .norms import NormLinear, without_autocast
from .router import choose_top_k

UNUSED: Final = -1  # a place without a token: the query has fewer than top_k tokens to see

# --- DSA: sampled tokens ---


@dataclass(frozen=True, eq=False)
class IndexCache:
    """The tokens that one DSA layer picked, for the layers of its group that reuse them.

    Attributes:
        indices: [B, T, K] int64: positions of the keys of each query, or `UNUSED`.
        doc_ids: the documents that they were picked in; None where each row is one document.
    """

    indices: Any
    doc_ids: Any = None


class Indexer(nn.Module):
    """Scores each pair of tokens by sum_j w_tj relu(q_tj . k_s), from one projection of the normed rows.

    No gradient passes to the rows: the indexer learns from `indexer_loss` alone.

    Args:
        hidden: width of the rows.
        heads: J, of the queries; the key is shared by all.
        width: of the queries and the key.
        eps: of the norm.
        dtype, device: of the parameters.
    """

    def __init__(
        self, hidden: int, heads: int, width: int, *, eps: float, dtype: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.projection = NormLinear(hidden, heads * (width + 1) + width, eps=eps, dtype=dtype, device=device)

    def forward(self, rows: Any, rope: tuple[Any, Any] | None = None) -> Any:
        """[B, T, hidden] -> scores [B, T, T] in fp32 at least, of query t and key s; `rope` as `ABlock` takes it."""
        mixed = at_least_fp32(self.projection(rows.detach()))
        query, key, weight = mixed.split([self.heads * self.width, self.width, self.heads], dim=-1)
        query, key = query.unflatten(-1, (self.heads, self.width)).transpose(1, 2), key.unsqueeze(1)
        if rope is not None:
            query, key = apply_rope(query, *rope), apply_rope(key, *rope)
        with without_autocast(rows):
            near = functional.relu(query @ key.transpose(-1, -2))
            return torch.einsum("bjts,btj->bts", near, weight) / math.sqrt(self.heads * self.width)


def pick_tokens(scores: Any, top_k: int, *, window: int = 1, doc_ids: Any | None = None) -> Any:
    """The tokens that each query sees: itself and the `window - 1` before it, then those of the highest score.

    Of equal scores the earlier token wins, on every device. No token is of another document, or after the query.

    Args:
        scores: [B, T, T], of query t and key s.
        top_k: tokens a query, its window among them.
        window: from 1 to `top_k`.
        doc_ids: [B, T] integers of packed documents.

    Returns:
        [B, T, min(top_k, T)] int64 positions, the window first; `UNUSED` where there is no further token.
    """
    near, visible = (
        attention_mask(scores.shape[-1], window=reach, doc_ids=doc_ids, device=scores.device)
        for reach in (window, None)
    )
    if doc_ids is not None:
        near, visible = near.squeeze(1), visible.squeeze(1)
    ranked = scores.masked_fill(near, math.inf).masked_fill(~visible, -math.inf)
    best, indices = ranked.sort(dim=-1, descending=True, stable=True)
    return indices.masked_fill(best == -math.inf, UNUSED)[..., :top_k]


def forbidden_rows(indices: Any, doc_ids: Any | None = None) -> Any:
    """Which queries [B, T] have a token after themselves, of another document or of no position, or no token."""
    length = indices.shape[1]
    places = torch.arange(length, device=indices.device).unsqueeze(-1)
    wrong = (indices > places) | (indices < UNUSED)
    if doc_ids is not None:
        found = doc_ids.gather(1, indices.clamp(0, length - 1).flatten(1)).view_as(indices)
        wrong = wrong | ((found != doc_ids.unsqueeze(-1)) & (indices >= 0))
    return wrong.any(dim=-1) | (indices < 0).all(dim=-1)


def sampled_attention(
    query: Any, key: Any, value: Any, indices: Any, *, scale: float | None = None, doc_ids: Any | None = None
) -> tuple[Any, Any]:
    """Attention over exactly the tokens that `indices` name.

    An index that a query must not see is an error: IndexError on the CPU. On a GPU the host does not wait, so that the
    call can be captured in a CUDA graph; there the whole row of that query is NaN, in every head.

    Args:
        query: [B, H, T, D], any floating dtype and strides.
        key, value: [B, G, T, D] in the dtype of `query`; G divides H.
        indices: [B, T, K] int64, each position at most once a query, or `UNUSED`; the same for all heads.
        scale: factor on the scores; None is 1 / sqrt(D).
        doc_ids: [B, T] integers of packed documents.

    Returns:
        [B, H, T, D] in the dtype of `query`, and the weights [B, H, T, K] in fp32 at least. Both in fp32 at least,
        gradients too, and rounded once.
    """
    length, width = query.shape[2:]
    wrong = forbidden_rows(indices, doc_ids)
    if wrong.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(
            f"query {wrong.nonzero()[0].tolist()} [batch, position] has a token that it must not see, or none. Likely "
            "cause: indices that were picked for other documents or another length. Next step: pick them again."
        )
    groups, places = key.shape[1], indices.clamp(0, length - 1).flatten(1)[:, None, :, None].expand(-1, -1, -1, width)
    rows, keys, values = (at_least_fp32(one) for one in (query, key, value))
    rows = rows.unflatten(1, (groups, -1)) * (width**-0.5 if scale is None else scale)
    keys, values = (
        one.gather(2, places.expand(-1, groups, -1, -1)).unflatten(2, (length, -1)) for one in (keys, values)
    )
    with without_autocast(query):
        scores = torch.einsum("bghtd,bgtkd->bghtk", rows, keys).flatten(1, 2)
        scores = scores.masked_fill((indices < 0).unsqueeze(1), -math.inf)
        weights = scores.masked_fill(wrong[:, None, :, None], math.nan).softmax(dim=-1)
        out = torch.einsum("bghtk,bgtkd->bghtd", weights.unflatten(1, (groups, -1)), values)
    return out.flatten(1, 2).to(query.dtype), weights


def indexer_loss(scores: Any, indices: Any, weights: Any) -> Any:
    """[] mean over queries of KL(attention || softmax of the scores), over the tokens that were picked.

    The sparse stage of DeepSeek-V3.2, eq. 4: the attention is the mean over heads, without a gradient.

    Args:
        scores: [B, T, T] of the indexer.
        indices, weights: as `sampled_attention` takes and gives them.
    """
    unused = indices < 0
    logs = scores.gather(-1, indices.clamp(min=0)).masked_fill(unused, -math.inf).log_softmax(dim=-1)
    wanted = weights.detach().mean(dim=1)
    return functional.kl_div(logs.masked_fill(unused, 0.0), wanted, reduction="none").sum(-1).mean()


class SampledBlock(ABlock):
    """The A-block with DSA in the place of its attention.

    Args:
        index_heads: of the indexer; 0 for a layer that reuses the tokens of another one, and has none.
        index_top_k, index_window: as `pick_tokens` takes them.
        options: as `ABlock` takes them.

    Attributes:
        indexer: `Indexer`; None where the layer reuses tokens.
    """

    def __init__(self, index_heads: int, *, index_top_k: int, index_window: int, **options: Any) -> None:
        super().__init__(**options)
        self.top_k, self.window, self.indexer = index_top_k, index_window, None
        if index_heads:
            made = {name: options.get(name) for name in ("dtype", "device")}
            self.indexer = Indexer(self.qkv.in_features, index_heads, self.head_dim, eps=self.eps, **made)

    def forward(  # type: ignore[override]
        self, rows: Any, *, rope: Any = None, doc_ids: Any = None, cache: IndexCache | None = None
    ) -> tuple[Any, IndexCache, Any]:
        """One step of the residual stream.

        Args:
            rows, rope, doc_ids: as `ABlock` takes them.
            cache: of the layer whose tokens this one reuses; not read by a layer that picks its own.

        Returns:
            The stream [B, T, hidden], the tokens it was computed with, and the loss of the indexer, [] or None.

        Raises:
            ValueError: a layer without an indexer gets no tokens, or those of other documents.
        """
        scores = None
        if self.indexer is not None:
            scores = self.indexer(rows, rope)
            picked = pick_tokens(scores.detach(), self.top_k, window=self.window, doc_ids=doc_ids)
            cache = IndexCache(picked, doc_ids)
        elif cache is None or cache.doc_ids is not doc_ids:
            raise ValueError(
                "this layer reuses tokens, and has none that were picked in the same documents. Next step: pass the "
                "cache of the layer that picks for it, from this very pass."
            )
        query, key, value = self.heads(rows, rope)
        seen, weights = sampled_attention(query, key, value, cache.indices, doc_ids=doc_ids)
        loss = None if scores is None else indexer_loss(scores, cache.indices, weights)
        return self.leave(rows, seen), cache, loss


# --- MoBA: routed blocks ---


def route_blocks(query: Any, key: Any, *, block_size: int, top_k: int) -> Any:
    """The key blocks that each query sees: its own, and the past ones whose mean key is nearest, `top_k` in all.

    Args:
        query: [B, H, T, D].
        key: [B, G, T, D]; G divides H.
        block_size: tokens of a block; the last one may be shorter.
        top_k: blocks a query.

    Returns:
        [B, H, T, N] bool for N blocks, without a gradient; no query sees a block that begins after it.
    """
    length, groups = query.shape[2], key.shape[1]
    own = torch.arange(length, device=query.device).unsqueeze(-1) // block_size
    with torch.no_grad(), without_autocast(query):
        means = split_chunks(at_least_fp32(key).flatten(0, 1), block_size).mean(dim=2).unflatten(0, (-1, groups))
        scores = at_least_fp32(query).unflatten(1, (groups, -1)) @ means.unsqueeze(2).transpose(-1, -2)
        blocks = torch.arange(means.shape[2], device=query.device)
        ranked = scores.flatten(1, 2).masked_fill(blocks == own, math.inf).masked_fill(blocks > own, -math.inf)
        return choose_top_k(ranked.flatten(0, 2), top_k).view_as(ranked) & (blocks <= own)
