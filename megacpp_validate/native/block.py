"""The A-block: attention and MLP on a residual stream, each behind its own norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from .attention import apply_rope, attention
from .mlp import Activation, NormMLP
from .norms import INIT_STD, NormLinear, without_autocast

# --- block ---


class ABlock(nn.Module):
    """x + out(attention(rope(qkv(norm(x))))), then x + mlp(norm(x)); causal, RMSNorm, no biases.

    Args:
        hidden: width of the residual stream.
        ffn_hidden: width F of the MLP.
        num_heads: query heads H.
        head_dim: D.
        num_gqa_groups: key and value heads G; divides H.
        activation: of the MLP.
        eps: of both norms.
        dtype, device: of the parameters.

    Attributes:
        qkv: `NormLinear` with weight [(H + 2G) x D, hidden]: rows of the queries, then the keys, then the values, each
            ordered by head.
        out: `nn.Linear` with weight [hidden, H x D].
        mlp: `NormMLP`.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_heads: int,
        head_dim: int,
        num_gqa_groups: int,
        *,
        activation: Activation = "swiglu",
        eps: float = 1e-5,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.num_gqa_groups, self.eps = num_heads, head_dim, num_gqa_groups, eps
        made = {"dtype": dtype, "device": device}
        self.qkv = NormLinear(hidden, (num_heads + 2 * num_gqa_groups) * head_dim, eps=eps, **made)
        self.out = nn.Linear(num_heads * head_dim, hidden, bias=False, **made)
        nn.init.normal_(self.out.weight, std=INIT_STD)
        self.mlp = NormMLP(hidden, ffn_hidden, activation=activation, eps=eps, **made)

    def forward(
        self,
        rows: Any,
        *,
        rope: tuple[Any, Any] | None = None,
        doc_ids: Any | None = None,
        window: int | None = None,
    ) -> Any:
        """One step of the residual stream.

        Args:
            rows: [B, T, hidden].
            rope: (cos, sin), each [at least T, D/2], from `rope_tables`; None turns nothing.
            doc_ids: [B, T] integers of packed documents.
            window: keys that a query sees, itself the last.

        Returns:
            [B, T, hidden] in the dtype of `rows`.
        """
        query, key, value = self.heads(rows, rope)
        return self.leave(rows, attention(query, key, value, doc_ids=doc_ids, window=window))

    def heads(self, rows: Any, rope: tuple[Any, Any] | None) -> tuple[Any, Any, Any]:
        """[B, T, hidden] -> query [B, H, T, D], key and value [B, G, T, D], query and key turned by `rope`."""
        heads, groups, width = self.num_heads, self.num_gqa_groups, self.head_dim
        mixed = self.qkv(rows).split([heads * width, groups * width, groups * width], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in mixed)
        if rope is not None:
            query, key = apply_rope(query, *rope), apply_rope(key, *rope)
        return query, key, value

    def leave(self, rows: Any, seen: Any) -> Any:
        """The stream [B, T, hidden] after what attention gave, [B, H, T, D], and after the MLP."""
        rows = rows + self.out(seen.transpose(1, 2).flatten(2))
        return rows + self.mlp(rows)


# --- streams ---
# Several residual streams: manifold-constrained hyper-connections.


class HyperConnection(nn.Module):
    """mHC: how a layer reads from n residual streams, and what it and they leave in each.

    streams' = residual @ streams + post (x) layer(pre @ streams), with pre = sigmoid, post = 2 sigmoid, and residual
    made doubly stochastic by Sinkhorn's iterations, so that no stream grows. Each is a base plus a gain times a
    projection of the normed streams: the score projections. At first all streams stay as they are, the layer reads
    their mean, and each gains its step.

    Source: Xie et al. 2025, arXiv:2512.24880, section 4.

    Args:
        hidden: width of a stream.
        streams: n, 2 or more.
        steps: Sinkhorn iterations.
        eps: of the norm.
        dtype, device: of the parameters: fp32 or fp64, because every later layer reads what is rounded here.

    Attributes:
        phi_pre, phi_post, phi_res: nn.Linear from n * hidden to n, n and n * n scores.
        bases: [2n + n * n], of pre, post and residual in that order.
        gains: [3].
    """

    def __init__(
        self, hidden: int, streams: int, *, steps: int = 20, eps: float = 1e-5, dtype: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        self.streams, self.steps, self.eps = streams, steps, eps
        made = {"dtype": dtype, "device": device}
        for name, width in (("phi_pre", streams), ("phi_post", streams), ("phi_res", streams**2)):
            projection = nn.Linear(streams * hidden, width, bias=False, **made)
            nn.init.normal_(projection.weight, std=INIT_STD)
            self.add_module(name, projection)
        residual = 4.0 * torch.eye(streams).flatten()
        pre = torch.full((streams,), -math.log(streams - 1))  # sigmoid of it is 1 / n
        self.bases = nn.Parameter(torch.cat([pre, torch.zeros(streams), residual]).to(**made))
        self.gains = nn.Parameter(torch.full((3,), 0.01, **made))

    def forward(self, streams: Any) -> tuple[Any, Any, Any]:
        """[B, T, n, hidden] -> pre and post [B, T, n] and residual [B, T, n, n], in the dtype of the parameters."""
        wide, many = self.bases.dtype, self.streams
        with without_autocast(streams):
            flat = streams.flatten(2).to(wide)
            flat = functional.rms_norm(flat, flat.shape[-1:], eps=self.eps)
            bases = self.bases.split([many, many, many**2])
            projections = (self.phi_pre, self.phi_post, self.phi_res)
            pre, post, residual = (
                base + gain * phi(flat) for base, gain, phi in zip(bases, self.gains, projections, strict=True)
            )
        return pre.sigmoid(), 2 * post.sigmoid(), sinkhorn(residual.unflatten(-1, (many, many)), self.steps)


def sinkhorn(logits: Any, steps: int) -> Any:
    """[..., n, n] -> exp(logits) with rows and columns scaled in turn to a sum of 1 (Sinkhorn & Knopp 1967)."""
    for _ in range(steps):
        logits = logits - logits.logsumexp(dim=-1, keepdim=True)
        logits = logits - logits.logsumexp(dim=-2, keepdim=True)
    return logits.exp()


def read_streams(streams: Any, pre: Any) -> Any:
    """What a layer reads, [B, T, hidden] in the dtype of the streams [B, T, n, hidden]; `pre` is [B, T, n]."""
    return torch.einsum("btn,btnd->btd", pre, streams.to(pre.dtype)).to(streams.dtype)


def write_streams(streams: Any, step: Any, post: Any, residual: Any) -> Any:
    """The streams [B, T, n, hidden] after a layer that gave the step [B, T, hidden]."""
    wide = residual.dtype
    kept = torch.einsum("btmn,btnd->btmd", residual, streams.to(wide))
    return (kept + post.unsqueeze(-1) * step.to(wide).unsqueeze(2)).to(streams.dtype)


# --- mla ---
# Multi-head latent attention: what goes into the attention, and the whole written out.

# Products over the normed rows, in the order of the fused weight.
INGRESS: Final = ("query.weight", "latent.weight", "rope_key.weight")

Turn = Callable[[Any, Any, Any], Any]


class LatentIngress(nn.Module):
    """Normed rows to query, key and value of every head.

    Args:
        hidden: width of the rows.
        num_heads: H, of queries, keys and values alike.
        head_dim: D, of which the last `rope_dim` channels of query and key carry positions.
        latent: width of what keys and values are compressed to.
        rope_dim: even, below D.
        fused: whether the three products over the rows are one, with one weight.
        latent_norm: the norm of the latent, with `weight` [latent].
        dtype, device: of the parameters.

    Attributes:
        weight: of the fused form: query, latent and rope key of the plain one, one below the other.
        query, latent, rope_key: of the plain form: nn.Linear to H * D, latent and rope_dim.
        latent_norm: the norm.
        heights: of the three products over the rows.
        up: nn.Linear to H * (D - rope_dim) + H * D: the keys of all heads, then the values of all heads.
    """

    def __init__(
        self,
        hidden: int,
        *,
        num_heads: int,
        head_dim: int,
        latent: int,
        rope_dim: int,
        latent_norm: nn.Module,
        fused: bool = False,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.hidden, self.num_heads, self.head_dim = hidden, num_heads, head_dim
        self.rope_dim, self.heights = rope_dim, [num_heads * head_dim, latent, rope_dim]
        self.fused, self.kept = fused, head_dim - rope_dim
        made = {"dtype": dtype, "device": device}
        if fused:
            self.weight = nn.Parameter(torch.empty(sum(self.heights), hidden, **made))
        else:
            self.query = nn.Linear(hidden, num_heads * head_dim, bias=False, **made)
            self.latent = nn.Linear(hidden, latent, bias=False, **made)
            self.rope_key = nn.Linear(hidden, rope_dim, bias=False, **made)
        self.latent_norm = latent_norm
        self.up = nn.Linear(latent, num_heads * (self.kept + head_dim), bias=False, **made)
        for name, weight in self.named_parameters():
            if not name.startswith("latent_norm."):
                nn.init.normal_(weight, std=INIT_STD)

    def forward(self, normed: Any, cos: Any, sin: Any, *, turn: Turn) -> tuple[Any, Any, Any]:
        """Query, key and value.

        Args:
            normed: [B, T, hidden].
            cos, sin: [at least T, rope_dim / 2], from `rope.rope_tables`.
            turn: rotary embedding of [B, T, H, rope_dim] by the tables.

        Returns:
            Three of [B, H, T, D], which lie in memory as [B, T, H, D].
        """
        query, latent, rope_key = self._project(normed)
        query = query.unflatten(-1, (self.num_heads, self.head_dim))
        plain, turned = query.split([self.kept, self.rope_dim], dim=-1)
        query = torch.cat((plain, turn(turned, cos, sin)), dim=-1)
        keys, values = self.up(self.latent_norm(latent)).split(
            [self.num_heads * self.kept, self.num_heads * self.head_dim], dim=-1
        )
        shared = turn(rope_key.unsqueeze(2), cos, sin).expand(-1, -1, self.num_heads, -1)
        key = torch.cat((keys.unflatten(-1, (self.num_heads, self.kept)), shared), dim=-1)
        value = values.unflatten(-1, (self.num_heads, self.head_dim))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def named_weights(self) -> dict[str, Any]:
        """The weights under the names of the plain form, with their graph, whatever the form."""
        weights = dict(self.named_parameters())
        if not self.fused:
            return weights
        parts = weights.pop("weight").split(self.heights)
        return {**dict(zip(INGRESS, parts, strict=True)), **weights}

    def _project(self, normed: Any) -> Any:
        if not self.fused:
            return self.query(normed), self.latent(normed), self.rope_key(normed)
        return functional.linear(normed, self.weight).split(self.heights, dim=-1)
