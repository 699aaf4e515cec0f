"""How rows come into a layer whose heads and columns are split over a tensor group, and how its parts are summed.

With sequence parallelism a rank holds some positions of each sequence between layers: they are gathered on the way in,
and parts are summed and scattered on the way out (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2: g and its
conjugate). Without it every rank holds all positions: nothing moves on the way in, and parts are summed on the way out
(Shoeybi et al. 2019, arXiv:1909.08053, section 3: f and g). The backward pass of each is the forward pass of the other.

Called under names that torch 2.11 and 2.13 both have: those that take a whole tensor were renamed in 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class TensorBorder:
    """Where the stream meets a layer that is split.

    Attributes:
        group: the tensor group, in the order of the parts.
        sequence_parallel: whether the stream holds this rank's positions only.
    """

    group: Any
    sequence_parallel: bool

    def enter(self, rows: Any) -> Any:
        """[B, T / tp, hidden] or, without sequence parallelism, [B, T, hidden] -> [B, T, hidden], on every rank."""
        return _Gather.apply(rows, self.group) if self.sequence_parallel else _Copy.apply(rows, self.group)

    def leave(self, parts: Any) -> Any:
        """The sum of [B, T, hidden] over the group, as the stream holds it: the inverse way of `enter`."""
        return _Scatter.apply(parts, self.group) if self.sequence_parallel else _Sum.apply(parts, self.group)

    def sum_inside(self, parts: Any) -> Any:
        """The sum of tensors of one shape over the group, which every rank goes on with for its own part.

        Each rank's gradient of the sum is a part too: they are summed on the way back.
        """
        return _SumBothWays.apply(parts, self.group)


def gather_positions(rows: Any, group: Any) -> Any:
    """[B, T / tp, ...] -> [B, T, ...], positions by the order of the ranks; nothing is differentiated."""
    rows = rows.contiguous()
    parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, rows, group=group)
    return torch.cat(parts, dim=1)


def scatter_positions(parts: Any, group: Any) -> Any:
    """[B, T, ...] -> [B, T / tp, ...], the sum over the group; nothing is differentiated."""
    each = [part.contiguous() for part in parts.chunk(distributed.get_world_size(group), dim=1)]
    mine = torch.empty_like(each[0])
    distributed.reduce_scatter(mine, each, group=group)
    return mine


def sum_parts(parts: Any, group: Any) -> Any:
    """The sum over the group, a new tensor; nothing is differentiated."""
    summed = parts.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(summed, group=group)
    return summed


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, group: Any) -> Any:
        ctx.group = group
        return gather_positions(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return scatter_positions(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, group: Any) -> Any:
        ctx.group = group
        return scatter_positions(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return gather_positions(gradient, ctx.group), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, group: Any) -> Any:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return sum_parts(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, group: Any) -> Any:  # noqa: ARG004 - what autograd calls it with
        return sum_parts(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:  # noqa: ARG004 - as above
        return gradient, None


class _SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, group: Any) -> Any:
        ctx.group = group
        return sum_parts(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return sum_parts(gradient, ctx.group), None
