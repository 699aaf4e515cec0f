"""What one rank does to rows between exchanges: by the kernels of `bridge.jagged_experts`, or in plain torch.

Both are the same mathematics with the same roundings, forward and backward written out: a gated expert without the
weight of its assignment, which the rank of the token applies when it sums. Plain torch takes every dtype and device,
and loops over experts by numbers that the host has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from ...bridge.jagged_experts import (
    Order,
    combine_rows,
    combine_rows_backward,
    gate_rows,
    gate_rows_backward,
    gather_rows,
    grouped_product,
    why_not_fused,
    zero_idle,
)


class FusedRows:
    """On the GPU, by kernels that read on the device where rows end."""

    @staticmethod
    def gather(tokens: Any, order: Order) -> Any:
        """Tokens [T, D] as rows [R, D]."""
        return gather_rows(tokens, order)

    @staticmethod
    def combine(rows: Any, order: Order, weights: Any = None) -> Any:
        """The sum of each token's rows [R, D] -> [T, D], times weights [T, k] where there are any."""
        return combine_rows(rows, order, weights)

    @staticmethod
    def combine_backward(grad: Any, order: Order, weights: Any, rows: Any) -> tuple[Any, Any]:
        """Gradients of rows [R, D] and weights [T, k] from that of their weighted sum [T, D]."""
        return combine_rows_backward(grad, order, weights, rows)

    @staticmethod
    def gate(up: Any) -> Any:
        """silu(gate) x linear, [R, 2F] -> [R, F]."""
        return gate_rows(up)

    @staticmethod
    def gate_backward(up: Any, of_inner: Any) -> tuple[Any, Any]:
        """The gradient of `up`, and once more what `gate` gave."""
        of_up, _, inner = gate_rows_backward(up, of_inner)
        return of_up, inner

    @staticmethod
    def product(rows: Any, weight: Any, order: Order, counts: Sequence[int]) -> Any:  # noqa: ARG004 - the other's
        """rows[e] @ weight[e] of each expert; [R, K] and [E, K, N] -> [R, N]."""
        return grouped_product(rows, weight, order.ends)

    @staticmethod
    def weight_gradient(grad: Any, rows: Any, order: Order, counts: Sequence[int]) -> Any:  # noqa: ARG004 - likewise
        """grad[e]^T @ rows[e] of each expert; [R, N] and [R, K] -> [E, N, K], zeros where it has no rows."""
        return zero_idle(grouped_product(grad.t(), rows, order.ends), order.ends)


class PlainRows:
    """In plain torch: sums in fp32 at least, rounded once."""

    @staticmethod
    def gather(tokens: Any, order: Order) -> Any:
        """As `FusedRows`; so are the others."""
        return tokens.index_select(0, order.order.long() // order.place.shape[1])

    @staticmethod
    def combine(rows: Any, order: Order, weights: Any = None) -> Any:  # noqa: D102
        tokens, top_k = order.place.shape
        taken = rows.to(_wide(rows)).index_select(0, order.place.reshape(-1).long())
        taken = taken.reshape(tokens, top_k, rows.shape[1])
        return (taken if weights is None else taken * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)

    @staticmethod
    def combine_backward(grad: Any, order: Order, weights: Any, rows: Any) -> tuple[Any, Any]:  # noqa: D102
        assignment, wide = order.order.long(), _wide(rows)
        of_sum = grad.to(wide).index_select(0, assignment // order.place.shape[1])
        scale = weights.reshape(-1).index_select(0, assignment).unsqueeze(-1)
        of_weights = (of_sum * rows.to(wide)).sum(dim=1).index_select(0, order.place.reshape(-1).long())
        return (of_sum * scale).to(rows.dtype), of_weights.reshape(weights.shape).to(weights.dtype)

    @staticmethod
    def gate(up: Any) -> Any:  # noqa: D102
        gate, linear = up.to(_wide(up)).chunk(2, dim=-1)
        return (functional.silu(gate) * linear).to(up.dtype)

    @staticmethod
    def gate_backward(up: Any, of_inner: Any) -> tuple[Any, Any]:  # noqa: D102
        gate, linear = up.to(_wide(up)).chunk(2, dim=-1)
        grad, sigmoid = of_inner.to(gate.dtype), gate.sigmoid()
        silu = gate * sigmoid
        of_gate = grad * linear * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat([of_gate, grad * silu], dim=1).to(up.dtype), (silu * linear).to(up.dtype)

    @staticmethod
    def product(rows: Any, weight: Any, order: Order, counts: Sequence[int]) -> Any:  # noqa: ARG004, D102
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        for into, piece, one in zip(out.split(counts), rows.split(counts), weight.unbind(0), strict=True):
            torch.mm(piece, one, out=into)
        return out

    @staticmethod
    def weight_gradient(grad: Any, rows: Any, order: Order, counts: Sequence[int]) -> Any:  # noqa: ARG004, D102
        out = rows.new_empty(len(counts), grad.shape[1], rows.shape[1])
        for into, of_rows, piece in zip(out.unbind(0), grad.split(counts), rows.split(counts), strict=True):
            torch.mm(of_rows.t(), piece, out=into)  # of no rows: zeros
        return out


Rows = type[FusedRows] | type[PlainRows]


def rows_path(rows: Any, up_weight: Any, down_weight: Any) -> Rows:
    """Which of both takes rows [R, D] with experts of these weights; none are plain torch's."""
    return PlainRows if why_not_fused(rows, up_weight, down_weight) else FusedRows


def _wide(rows: Any) -> Any:
    return torch.promote_types(rows.dtype, torch.float32)
