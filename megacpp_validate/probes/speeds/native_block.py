"""The whole A-block, forward and backward: in bf16, and in the target's production recipe."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..bench import Bench
from ..stopwatch import Stopwatch, Use
from .precision import production_precisions


def speed(stopwatch: Stopwatch) -> None:
    """One use a precision."""
    for name, scope in production_precisions(stopwatch.bench).items():
        stopwatch.add(f"{name}.block.forward-backward", partial(_new_use, stopwatch.bench, scope))


def _new_use(bench: Bench, scope: Any) -> Use:
    if bench.device == "cuda":
        batch, length, hidden, ffn, heads, groups = 2, 2048, 2048, 5632, 16, 4
    else:
        batch, length, hidden, ffn, heads, groups = 1, 64, 128, 256, 4, 2
    layer = bench.bridge().NativeBlock(
        hidden=hidden, ffn_hidden=ffn, num_heads=heads, head_dim=hidden // heads, num_gqa_groups=groups,
        activation="swiglu", eps=1e-5, dtype=torch.bfloat16, device=bench.device,
    )  # fmt: skip
    rows = bench.randn(batch, length, hidden, dtype=torch.bfloat16, grad=True)
    gradient = bench.randn(batch, length, hidden, dtype=torch.bfloat16)
    leaves = (rows, *layer.parameters())

    def call() -> Any:
        with scope():
            out = layer(rows)
        torch.autograd.grad(out, leaves, gradient)
        return out

    return Use(call, lambda: layer.choice)
