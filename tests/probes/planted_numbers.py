"""Faults of tensors that a probe must see, and the checks of a bench that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megacpp_validate.probes.bench import Bench

Fault = Callable[..., Any]


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
