"""Faults of tensors that a probe must see, and the checks of a bench that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target

RECIPES = ("delayed", "current", "block")
Fault = Callable[..., Any]


def new_bench(probe: str, requested: str = "native", recipes: tuple[str, ...] = (), **more: Any) -> Bench:
    """A bench on the CPU, of the smallest shapes unless `quick` is False; `arch`, `attention`, ... are the target's."""
    of_target = {
        name: more.pop(name) for name in ("arch", "attention", "deep_gemm", "production_recipe") if name in more
    }
    target = Target("cpu", of_target.pop("arch", ""), recipes, **of_target)
    return Bench(Order(probe, "stack", target, requested, **{"quick": True, **more}))


def run_probe(module: Any, requested: str = "native", recipes: tuple[str, ...] = (), **more: Any) -> Bench:
    """A bench on which a probe ran, and what it keeps for the end."""
    bench = new_bench(module.__name__.rpartition(".")[2], requested, recipes, **more)
    module.probe(bench)
    if hasattr(module, "probe_last"):
        module.probe_last(bench)
    return bench


def failed(bench: Bench) -> set[str]:
    """Names of the checks that failed."""
    return {check.name for check in bench.checks if not check.passed}


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, fault: Fault) -> Any:
        ctx.fault = fault
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return ctx.fault(gradient), None


def in_gradient(fault: Fault) -> Fault:
    """The tensor as it is, with something done to its gradient."""
    return lambda tensor: _Gradient.apply(tensor, fault)


def one_nan(tensor: Any, at: int = -1) -> Any:
    """The last number, or another one, is none."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    if tensor.numel():
        mask.view(-1)[at] = True
    return tensor.masked_fill(mask, float("nan"))


def half_zeros(tensor: Any) -> Any:
    """The first half of all numbers is zero."""
    keep = torch.ones_like(tensor)
    keep.view(-1)[: tensor.numel() // 2] = 0
    return tensor * keep


def half_of_the_rows(tensor: Any) -> Any:
    """The second half of the rows, [rows, ...], is zero."""
    keep = torch.ones_like(tensor)
    keep[len(tensor) // 2 :] = 0
    return tensor * keep


def half_of_axis_1(tensor: Any) -> Any:
    """The first half along axis 1 is zero."""
    keep = torch.ones_like(tensor)
    keep[:, : tensor.shape[1] // 2] = 0
    return tensor * keep


VALUES: dict[str, Fault] = {
    "zeros": lambda tensor: tensor * 0,
    "half zeros": half_zeros,
    "x0.5": lambda tensor: tensor * 0.5,
    "x2": lambda tensor: tensor * 2,
    "x1.01": lambda tensor: tensor * 1.01,
    "sign": lambda tensor: -tensor,
    "shuffled": lambda tensor: tensor.roll(1, -1),
    "one NaN": one_nan,
}
