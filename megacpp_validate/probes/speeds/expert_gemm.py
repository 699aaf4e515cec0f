"""The expert bank, forward and backward: in bf16, and in the target's production recipe."""

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
        stopwatch.add(f"{name}.experts8.forward-backward", partial(_new_use, stopwatch.bench, scope))


def _new_use(bench: Bench, scope: Any) -> Use:
    """Every expert has as many rows, a multiple of what any recipe pads to."""
    experts = 8
    tokens, wide, narrow = (1024, 4096, 2048) if bench.device == "cuda" else (32, 128, 64)
    layer = bench.bridge().ExpertGemm(
        num_experts=experts, in_features=wide, out_features=narrow, dtype=torch.bfloat16, device=bench.device
    )
    rows = bench.randn(experts * tokens, wide, dtype=torch.bfloat16, grad=True)
    gradient = bench.randn(experts * tokens, narrow, dtype=torch.bfloat16)
    leaves = (rows, *layer.parameters())

    def call() -> Any:
        with scope():
            out = layer(rows, [tokens] * experts)
        torch.autograd.grad(out, leaves, gradient)
        return out

    return Use(call, lambda: layer.choice)
