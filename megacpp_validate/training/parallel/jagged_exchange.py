"""The jagged path with experts on several ranks: one node of the graph, in whose forward the host waits once.

    sort by expert; numbers of rows, all-to-all | meanwhile rows are gathered; the host waits for the numbers
    rows, all-to-all                            | meanwhile the order in which they will be needed is made
    up, gate, down of the experts here
    rows back, all-to-all; each token sums its rows, times their weights, in fp32

The host needs numbers of rows because NCCL takes splits from it. The backward knows them and waits for nothing; the
gradients of the experts' weights are computed while those of the rows fly back. Rows of an expert lie by source rank
and then by token, as one rank has them (`expert_parallel`).

The weight of an assignment stays with its token, where `bridge.jagged_experts` applies it before the last product: so
nothing but rows is exchanged. The same function with one rounding at another place. Saved for the backward are what
experts got, what the first product gave, and what came back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...bridge.jagged_experts import (
    Order,
    combine_rows,
    combine_rows_backward,
    gate_rows,
    gate_rows_backward,
    gather_rows,
    grouped_product,
    packed,
    sort_by_expert,
    why_not_fused,
    zero_idle,
)
from ...native.autocast import without_autocast
from .expert_parallel import WrongExchange
from .token_counts import RowDigest, TokenCounts, digest_chunks, refuse_difference


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of rows of one pass.

    Attributes:
        counts: what is sent and received, on the host.
        here: int32 [E], the received ones by source rank and then by expert, on the device.
        sent: rows for each rank.
        received: rows from each rank.
        per_expert: rows of each expert of this rank.
    """

    counts: TokenCounts
    here: Any
    sent: tuple[int, ...]
    received: tuple[int, ...]
    per_expert: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Flight:
    """An exchange on its way: what it reads and writes must live until it has landed."""

    out: Any
    given: Any
    work: Any

    def land(self) -> Any:
        """What arrived; on a GPU the stream waits, not the host."""
        self.work.wait()
        return self.out


class JaggedExchange:
    """Tokens through experts that are shared out over a group.

    Every rank of the group calls `run` in the same order, all with or all without gradients, and runs the backward.

    Args:
        num_experts: E of the layer; rank r of the group holds the experts from r * E / ranks on.
        group: process group; None is the whole world.
        audit: whether what arrives is compared with what was sent, bit by bit, in both directions of the forward. The
            host then waits more.

    Attributes:
        counts: of the last pass; None before the first.

    Raises:
        WrongExchange: experts that cannot be shared out evenly.
    """

    def __init__(self, num_experts: int, *, group: Any = None, audit: bool = False) -> None:
        self.group, self.num_experts, self.audit = group, num_experts, audit
        self.ranks = distributed.get_world_size(group)
        if num_experts < 1 or num_experts % self.ranks:
            raise WrongExchange(
                f"{num_experts} experts cannot be shared out over {self.ranks} ranks. Next step: make expert_parallel "
                "a divisor of num_experts."
            )
        self.local_experts = num_experts // self.ranks
        self.counts: TokenCounts | None = None
        self._chunk_experts: Any = None

    def run(self, tokens: Any, chosen: Any, weights: Any, up_weight: Any, down_weight: Any) -> Any:
        """Each token through its k experts, wherever they lie, summed with their weights.

        Args:
            tokens: [T, D]; T may be 0.
            chosen: int64 [T, k], the experts of each token, numbers of the whole layer, each at most once.
            weights: fp32 (fp64 beside tokens in fp64) [T, k].
            up_weight: [E / ranks, 2F, D] in the dtype of the tokens, the gate first.
            down_weight: [E / ranks, D, F], likewise.

        Returns:
            [T, D] in the dtype of the tokens.

        Raises:
            WrongExchange: tensors that do not belong together.
            TokensNotConserved: what arrived is not what was sent (audit).
        """
        self._check(tokens, chosen, weights, up_weight, down_weight)
        with without_autocast(tokens):
            return _ExchangedMoe.apply(tokens, chosen, weights, up_weight, down_weight, self)

    def start_numbers(self, ends: Any) -> Flight:
        """Tell every rank how many rows it gets for each of its experts; `ends` int32 [E] of the rows here."""
        announced = ends.new_empty(2, self.num_experts)
        announced[0].copy_(ends)
        announced[0, 1:].sub_(ends[:-1])
        work = distributed.all_to_all_single(announced[1], announced[0], group=self.group, async_op=True)
        return Flight(announced, ends, work)

    def hear(self, flight: Flight) -> Numbers:
        """The numbers; the host waits."""
        announced = flight.land()
        sent, flat = announced.tolist()
        each = self.local_experts
        received = tuple(tuple(flat[first : first + each]) for first in range(0, len(flat), each))
        self.counts = TokenCounts(tuple(sent), received)
        per_rank = tuple(sum(sent[first : first + each]) for first in range(0, len(sent), each))
        per_expert = tuple(map(sum, zip(*received, strict=True)))
        return Numbers(self.counts, announced[1], per_rank, tuple(map(sum, received)), per_expert)

    def order_arrived(self, numbers: Numbers) -> Order:
        """Where what arrives by source rank lies when it is sorted by expert, and within an expert by source."""
        if self._chunk_experts is None or self._chunk_experts.device != numbers.here.device:
            each = torch.arange(self.local_experts, device=numbers.here.device)
            self._chunk_experts = each.repeat(self.ranks)
        total = sum(numbers.received)
        experts = self._chunk_experts.repeat_interleave(numbers.here, output_size=total)
        return sort_by_expert(experts.unsqueeze(1), self.local_experts)

    def compare(self, stage: Any, sent: Any, arrived: Any, numbers: Numbers) -> None:
        """Raises TokensNotConserved where chunks are not what their rank sent; a collective call, where audited."""
        if not self.audit:
            return
        flat = tuple(count for source in numbers.counts.received for count in source)
        chunks = (numbers.counts.sent, flat) if stage == "dispatch" else (flat, numbers.counts.sent)
        mine = digest_chunks(sent, chunks[0]).values
        expected = torch.empty_like(mine)
        distributed.all_to_all_single(expected, mine, group=self.group)
        refuse_difference(stage, RowDigest(expected), digest_chunks(arrived, chunks[1]), self.group)

    def _check(self, tokens: Any, chosen: Any, weights: Any, up_weight: Any, down_weight: Any) -> None:
        fits = (
            tokens.dim() == chosen.dim() == 2
            and weights.shape == chosen.shape
            and chosen.shape[0] == tokens.shape[0]
            and 1 <= chosen.shape[1] <= self.num_experts
            and up_weight.shape == (self.local_experts, 2 * down_weight.shape[-1], tokens.shape[1])
            and down_weight.shape[:2] == (self.local_experts, tokens.shape[1])
        )
        wide = torch.promote_types(tokens.dtype, torch.float32)
        alike = tokens.dtype == up_weight.dtype == down_weight.dtype and weights.dtype == wide
        if not fits or not alike or chosen.dtype != torch.int64:
            given = ", ".join(f"{one.dtype} {list(one.shape)}" for one in (tokens, chosen, weights))
            raise WrongExchange(
                f"tokens, chosen and weights are {given}, beside experts {up_weight.dtype} {list(up_weight.shape)} and "
                f"{down_weight.dtype} {list(down_weight.shape)}, {self.local_experts} of them on this rank. Likely "
                "cause: experts of the whole layer, or tokens that were not flattened. Next step: pass [T, D], int64 "
                f"[T, k], {wide} [T, k], [E, 2F, D] and [E, D, F] with the experts of this rank."
            )


def start_rows(rows: Any, sent: tuple[int, ...], received: tuple[int, ...], group: Any) -> Flight:
    """All-to-all of rows [sum of sent, D] -> [sum of received, D] by source rank."""
    out = rows.new_empty(sum(received), rows.shape[1])
    work = distributed.all_to_all_single(out, rows, list(received), list(sent), group=group, async_op=True)
    return Flight(out, rows, work)


class _ExchangedMoe(torch.autograd.Function):
    """Everything between the router and the residual stream."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Any, chosen: Any, weights: Any, up_weight: Any, down_weight: Any, exchange: JaggedExchange
    ) -> Any:
        tokens, weights = tokens.contiguous(), weights.contiguous()
        up_weight, down_weight = packed(up_weight), packed(down_weight)
        near = rows_path(tokens, up_weight, down_weight)
        order = sort_by_expert(chosen, exchange.num_experts)
        flight = exchange.start_numbers(order.ends)
        rows = near.gather(tokens, order)
        numbers = exchange.hear(flight)
        flight = start_rows(rows, numbers.sent, numbers.received, exchange.group)
        local = exchange.order_arrived(numbers)
        moved = flight.land()
        exchange.compare("dispatch", rows, moved, numbers)
        far = rows_path(moved, up_weight, down_weight)
        arrived = far.gather(moved, local)
        del flight, rows, moved
        up = far.product(arrived, up_weight.transpose(1, 2), local, numbers.per_expert)
        out = far.product(far.gate(up), down_weight.transpose(1, 2), local, numbers.per_expert)
        back = far.combine(out, local)
        returned = start_rows(back, numbers.received, numbers.sent, exchange.group).land()
        exchange.compare("combine", back, returned, numbers)
        mixed = near.combine(returned, order, weights)
        places = (order.order, order.place, order.ends, local.order, local.place, local.ends)
        ctx.save_for_backward(weights, up_weight, down_weight, arrived, up, returned, *places)
        ctx.near, ctx.far, ctx.numbers, ctx.group = near, far, numbers, exchange.group
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, Any, Any, Any, None]:
        weights, up_weight, down_weight, arrived, up, returned, *places = ctx.saved_tensors
        order, local = Order(*places[:3]), Order(*places[3:])
        near, far, numbers, group = ctx.near, ctx.far, ctx.numbers, ctx.group
        of_returned, of_weights = near.combine_backward(grad.contiguous(), order, weights, returned)
        of_back = start_rows(of_returned, numbers.sent, numbers.received, group).land()
        of_out = far.gather(of_back, local)
        del of_returned, of_back
        of_inner = far.product(of_out, down_weight, local, numbers.per_expert)
        of_up, inner = far.gate_backward(up, of_inner)
        of_moved = far.combine(far.product(of_up, up_weight, local, numbers.per_expert), local)
        flight = start_rows(of_moved, numbers.received, numbers.sent, group)
        of_down = far.weight_gradient(of_out, inner, local, numbers.per_expert)
        of_up_weight = far.weight_gradient(of_up, arrived, local, numbers.per_expert)
        of_tokens = near.combine(flight.land(), order)
        return of_tokens, None, of_weights, of_up_weight, of_down, None


# --- jagged rows
#
# What one rank does to rows between exchanges: by the kernels of `bridge.jagged_experts`, or in plain torch.
#
# Both are the same mathematics with the same roundings, forward and backward written out: a gated expert without the
# weight of its assignment, which the rank of the token applies when it sums. Plain torch takes every dtype and device,
# and loops over experts by numbers that the host has.


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
