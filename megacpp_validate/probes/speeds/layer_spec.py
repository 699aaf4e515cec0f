"""The norm and in-projection of a Mamba mixer as one layer, forward and backward: in bf16 and the production recipe."""

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
        stopwatch.add(f"{name}.mamba-in-projection.forward-backward", partial(_new_use, stopwatch.bench, scope))


def _new_use(bench: Bench, scope: Any) -> Use:
    """2048 -> 2 x 4096 + 2 x 128 + 64 = 8512 features on a GPU: a multiple of what any recipe wants."""
    tokens, hidden, state, head_dim = (4096, 2048, 128, 64) if bench.device == "cuda" else (64, 128, 16, 16)
    mixer = bench.bridge().build_mamba_mixer(
        hidden, state=state, head_dim=head_dim, dtype=torch.bfloat16, device=bench.device
    )
    layer = mixer.in_projection
    rows = bench.randn(2, tokens // 2, hidden, dtype=torch.bfloat16, grad=True)
    gradient = bench.randn(2, tokens // 2, layer.weight.shape[0], dtype=torch.bfloat16)
    leaves = (rows, *layer.parameters())

    def call() -> Any:
        with scope():
            out = layer(rows)
        torch.autograd.grad(out, leaves, gradient)
        return out

    return Use(call, lambda: mixer.choice)
