"""MoE dispatch in bf16: tokens to two experts each and back, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from ..bench import Bench
from ..stopwatch import Stopwatch, Use


def speed(stopwatch: Stopwatch) -> None:
    """One use: every further width or option is tuned and compiled for seconds at its first use."""
    stopwatch.add("bf16.top2.there-and-back.forward-backward", lambda: _new_use(stopwatch.bench))


def _new_use(bench: Bench) -> Use:
    """The numbers of rows are given, so that no call waits for the device."""
    experts, (tokens, width) = 8, (16384, 2048) if bench.device == "cuda" else (256, 128)
    dispatch = bench.bridge().Dispatch(experts)
    given = bench.randn(tokens, width, dtype=torch.bfloat16, grad=True)
    probs = bench.rand(tokens, experts).add_(0.05).requires_grad_()
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool, device=bench.device)
    routing_map.scatter_(1, bench.rand(tokens, experts).argsort(1)[:, :2], True)
    counts = routing_map.sum(0).tolist()
    gradient = bench.randn(tokens, width, dtype=torch.bfloat16)

    def call() -> Any:
        sent = dispatch.permute(given, probs, routing_map, rows_per_expert=counts)
        back = dispatch.unpermute(sent.rows, sent.row_map)
        torch.autograd.grad(back, (given,), gradient)
        return back

    return Use(call, lambda: dispatch.choice)
