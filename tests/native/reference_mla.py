"""Multi-head latent attention written out: the reference of its layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def reference_mla(
    rows: Any, weights: Mapping[str, Any], rope: tuple[Any, Any], *, num_heads: int, head_dim: int, eps: float
) -> Any:
    """x + out(attention), then x + mlp(norm(x)) with SwiGLU, head by head and with nothing fused.

    Args:
        rows: [B, T, hidden], in fp64 to be a reference.
        weights: under the names of `training.layers.MlaLayer`, in the dtype of `rows`.
        rope: (cos, sin), each [at least T, rope_dim / 2].
        num_heads, head_dim: H and D.
        eps: of all norms.

    Returns:
        [B, T, hidden].
    """

    def norm(x: Any, name: str) -> Any:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[name]

    length = rows.shape[1]
    cos, sin = (table[:length].to(rows.dtype) for table in rope)

    def turn(x: Any) -> Any:
        first, second = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    normed = norm(rows, "norm.weight")
    latent = norm(normed @ weights["latent.weight"].T, "latent_norm.weight")
    position = turn(normed @ weights["rope_key.weight"].T)
    kept = head_dim - position.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=rows.device).triu(1)
    seen = []
    for head in range(num_heads):
        query = normed @ weights["query.weight"][head * head_dim : (head + 1) * head_dim].T
        key = latent @ weights["up.weight"][head * kept : (head + 1) * kept].T
        first = num_heads * kept + head * head_dim
        value = latent @ weights["up.weight"][first : first + head_dim].T
        scores = query[..., :kept] @ key.transpose(1, 2) + turn(query[..., kept:]) @ position.transpose(1, 2)
        scores = (scores / math.sqrt(head_dim)).masked_fill(later, -math.inf)
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        seen.append(powers / powers.sum(-1, keepdim=True) @ value)
    rows = rows + torch.cat(seen, -1) @ weights["out.weight"].T
    gate, linear = (norm(rows, "mlp.layer_norm_weight") @ weights["mlp.fc1_weight"].T).chunk(2, -1)
    return rows + (gate / (1 + (-gate).exp()) * linear) @ weights["mlp.fc2_weight"].T
