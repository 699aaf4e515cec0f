"""TorchInductor on the CPU: two small programs, forward and backward, as C++. What every machine can compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from .order import JitOrder


def compile_task(order: JitOrder) -> None:
    """Settings: `program` ("norm" or "gated"), `rows` and `width` of its input, fp32."""
    import torch

    torch.manual_seed(order.seed)
    rows, width = int(order.setting("rows", "64")), int(order.setting("width", "32"))
    name = order.setting("program", "norm")
    if name not in PROGRAMS:
        raise ValueError(f"there is no program {name!r}. Next step: choose one of {', '.join(PROGRAMS)}.")
    compiled = torch.compile(PROGRAMS[name], dynamic=False)
    x = torch.randn(rows, width, requires_grad=True)
    compiled(x).backward()


def _norm(x: Any) -> Any:
    """RMSNorm, summed: [R, D] -> []."""
    return (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).sum()


def _gated(x: Any) -> Any:
    """silu(gate) x linear, averaged: [R, 2F] -> []."""
    gate, linear = x.chunk(2, dim=-1)
    return (gate * gate.sigmoid() * linear).mean()


PROGRAMS: Final[dict[str, Callable[[Any], Any]]] = {"norm": _norm, "gated": _gated}
