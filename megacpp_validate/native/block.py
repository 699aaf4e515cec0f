"""The A-block: attention and MLP on a residual stream, each behind its own norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from .attention import apply_rope, attention
from .mlp import Activation, NormMLP
from .norms import INIT_STD, NormLinear

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
        if num_gqa_groups < 1 or num_heads % num_gqa_groups:
            raise ValueError(
                f"{num_heads} query heads cannot share {num_gqa_groups} key and value heads evenly; "
                f"num_gqa_groups must divide num_heads."
            )
        self.num_heads, self.head_dim, self.num_gqa_groups = num_heads, head_dim, num_gqa_groups
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
        if rows.dim() != 3:
            raise ValueError(f"the block takes rows [B, T, hidden]; it was given {tuple(rows.shape)}.")
        query, key, value = self._heads(rows)
        if rope is not None:
            cos, sin = rope
            query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        seen = attention(query, key, value, doc_ids=doc_ids, window=window)
        rows = rows + self.out(seen.transpose(1, 2).flatten(2))
        return rows + self.mlp(rows)

    def _heads(self, rows: Any) -> tuple[Any, Any, Any]:
        """[B, T, hidden] -> query [B, H, T, D], key and value [B, G, T, D]."""
        heads, groups, width = self.num_heads, self.num_gqa_groups, self.head_dim
        mixed = self.qkv(rows).split([heads * width, groups * width, groups * width], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in mixed)
        return query, key, value


# --- mla ---
# Multi-head latent attention: what goes into the attention, and the whole written out.

# Product over the normed rows -> the attribute with its height, in the order of the fused weight.
INGRESS: Final = {"query.weight": "query_width", "latent.weight": "latent_width", "rope_key.weight": "rope_dim"}

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
        self.query_width, self.latent_width, self.rope_dim = num_heads * head_dim, latent, rope_dim
        self.fused, self.kept = fused, head_dim - rope_dim
        made = {"dtype": dtype, "device": device}
        if fused:
            self.weight = nn.Parameter(torch.empty(sum(self.heights), hidden, **made))
        else:
            self.query = nn.Linear(hidden, self.query_width, bias=False, **made)
            self.latent = nn.Linear(hidden, latent, bias=False, **made)
            self.rope_key = nn.Linear(hidden, rope_dim, bias=False, **made)
        self.latent_norm = latent_norm
        self.up = nn.Linear(latent, num_heads * (self.kept + head_dim), bias=False, **made)
        for name, weight in self.named_parameters():
            if not name.startswith("latent_norm."):
                nn.init.normal_(weight, std=INIT_STD)

    @property
    def heights(self) -> list[int]:
        """Of the three products over the rows."""
        return [getattr(self, name) for name in INGRESS.values()]

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
