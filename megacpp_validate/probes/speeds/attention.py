"""Attention: causal, grouped queries, bf16; forward, and forward with backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..bench import Bench
from ..stopwatch import Stopwatch, Use


def speed(stopwatch: Stopwatch) -> None:
    """Both directions on the same sizes."""
    for direction in ("forward", "forward-backward"):
        stopwatch.add(f"bf16.causal.gqa4.{direction}", partial(_new_use, stopwatch.bench, direction))


def _new_use(bench: Bench, direction: str) -> Use:
    """Tensors lie in memory as [B, T, H, D], as a projection gives them: what lies otherwise is copied first."""
    batch, heads, groups, length, width = (2, 16, 4, 4096, 128) if bench.device == "cuda" else (1, 8, 2, 128, 32)
    layer = bench.bridge().Attention(
        num_heads=heads, head_dim=width, num_gqa_groups=groups, backends=("te", "sdpa"), device=bench.device
    )
    leaves = [bench.randn(batch, length, of, width, dtype=torch.bfloat16, grad=True) for of in (heads, groups, groups)]
    inputs = [leaf.transpose(1, 2) for leaf in leaves]
    gradient = bench.randn(batch, heads, length, width, dtype=torch.bfloat16)

    def call() -> Any:
        out = layer(*inputs)
        if direction == "forward-backward":
            torch.autograd.grad(out, leaves, gradient)
        return out

    return Use(call, lambda: layer.choice)
