"""A swapped linear layer, forward and backward: in bf16, and in the target's production recipe."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..bench import Bench
from ..stopwatch import Stopwatch, Use
from .precision import production_precisions


def speed(stopwatch: Stopwatch) -> None:
    """One use a precision."""
    for name, scope in production_precisions(stopwatch.bench).items():
        stopwatch.add(f"{name}.linear.forward-backward", partial(_new_use, stopwatch.bench, scope))


def _new_use(bench: Bench, scope: Any) -> Use:
    width, rows = (4096, 4096) if bench.device == "cuda" else (256, 128)
    tree = nn.ModuleDict({"fc1": nn.Linear(width, width, bias=False, device=bench.device, dtype=torch.bfloat16)})
    choice = bench.bridge().swap_linears(tree).choices["fc1"]
    layer = tree["fc1"]
    given = bench.randn(rows, width, dtype=torch.bfloat16, grad=True)
    gradient = bench.randn(rows, width, dtype=torch.bfloat16)

    def call() -> Any:
        with scope():
            out = layer(given)
        torch.autograd.grad(out, (given, layer.weight), gradient)
        return out

    return Use(call, lambda: choice)
