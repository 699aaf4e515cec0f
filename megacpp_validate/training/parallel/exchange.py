"""Expert parallelism: rows go to the rank that holds their expert, and come back (all-to-all).

Source: Lepikhin et al. 2021, GShard, arXiv:2006.16668, section 3.2, without its capacity: splits are uneven, and a rank
or an expert may get nothing. The numbers of rows are exchanged first, so the host waits for the device once a layer.

The result is that of one rank. The rows of an expert arrive in the order of the ranks of the group, and within a rank
by token: where the ranks read neighbouring sequences (`ParallelPlan.sequences`) one rank has them in the same order. So
each expert multiplies the same rows in the same order, and each token sums its experts in the same order: outputs,
gradients of tokens and of experts are bitwise those of one rank, where a matrix product of the same operands is. What
is summed over ranks only then (the router's gradient, and an expert's over expert_data) is the same terms in another
order, and differs by at most 2 (n - 1) u sum |term| (Higham 2002, section 4.2; n terms, u the unit roundoff).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import distributed
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...bridge.features import PRODUCTION, Features
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
from ...bridge.permute import Dispatch
from ...native.norms import without_autocast
from .checks import TokenCounts, check_rows, digest_chunks


class _Exchange:
    """Experts that are distributed over a group; every rank of the group runs forward and backward in the same order.

    Args:
        num_experts: E of the layer, divisible by the ranks; rank r of the group holds the experts from r * E / ranks
        on. group: process group; None is the whole world.
        features: whether Transformer Engine may sort the chunks of `ExpertExchange`.
        audit: whether rows are compared with what was sent, bit by bit, in both directions of the forward. The host
            then waits for the device; a run that is timed does without.

    Attributes:
        counts: of the last pass; None before the first.
    """

    def __init__(
        self, num_experts: int, *, group: Any = None, features: Features = PRODUCTION, audit: bool = False
    ) -> None:
        self.group, self.num_experts, self.audit = group, num_experts, audit
        self.ranks = distributed.get_world_size(group)
        self.local_experts = num_experts // self.ranks
        self.counts: TokenCounts | None = None
        self._sorting = Dispatch(num_experts, features=features)
        self._chunk_experts: Any = None

    def _read_counts(self, sent: list[int], received: list[int]) -> Numbers:
        """The numbers of rows of this pass: [E] sent, and [E] received by source rank and then by expert."""
        each = self.local_experts
        by_source = tuple(tuple(received[first : first + each]) for first in range(0, len(received), each))
        self.counts = TokenCounts(tuple(sent), by_source)
        per_rank = tuple(sum(sent[first : first + each]) for first in range(0, len(sent), each))
        return Numbers(self.counts, per_rank, tuple(map(sum, by_source)), tuple(map(sum, zip(*by_source, strict=True))))

    def _compare(self, stage: str, sent: Any, arrived: Any, counts: TokenCounts) -> None:
        """Raises TokensNotConserved where chunks differ from what their rank sent; a collective call, where audited."""
        if not self.audit:
            return
        chunks = (counts.sent, counts.flat) if stage == "dispatch" else (counts.flat, counts.sent)
        mine = digest_chunks(sent, chunks[0])
        expected = torch.empty_like(mine)
        distributed.all_to_all_single(expected, mine, group=self.group)
        check_rows(stage, expected, digest_chunks(arrived, chunks[1]), self.group)


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers of rows of one pass, on the host.

    Attributes:
        counts: sent and received rows.
        sent: rows for each rank.
        received: rows from each rank.
        per_expert: rows of each expert of this rank.
    """

    counts: TokenCounts
    sent: tuple[int, ...]
    received: tuple[int, ...]
    per_expert: tuple[int, ...]


class ExpertExchange(_Exchange):
    """Sends rows to their experts and takes the results back, around any expert bank."""

    def run(self, rows: Any, rows_per_expert: Any, bank: Callable[[Any, Sequence[int]], Any]) -> Any:
        """Dispatch, the expert bank of this rank, combine: [R, D] -> [R, D'].

        Args:
            rows: [R, D] sorted by expert, as `Dispatch.permute` lays them out; R may be 0.
            rows_per_expert: E numbers that sum to R.
            bank: rows [R', D] by expert and E / ranks numbers -> [R', D'], with a gradient also where R' is 0.

        Raises:
            TokensNotConserved: rows differ from what was sent (audit).
        """
        numbers = self._tell(rows, rows_per_expert)
        counts = numbers.counts
        moved = exchange_rows(rows, numbers.sent, numbers.received, self.group)
        self._compare("dispatch", rows, moved, counts)
        by_expert, by_source = _chunk_orders(self.num_experts, self.ranks)
        ordered, _ = self._sorting.sort_chunks(moved, counts.flat, by_expert)
        out = bank(ordered, numbers.per_expert)
        sizes = [counts.flat[chunk] for chunk in by_expert]
        back, _ = self._sorting.sort_chunks(out, sizes, by_source)
        returned = exchange_rows(back, numbers.received, numbers.sent, self.group)
        self._compare("combine", back, returned, counts)
        return returned

    def _tell(self, rows: Any, rows_per_expert: Any) -> Numbers:
        """Exchange numbers of rows; the host waits."""
        sent = [int(count) for count in rows_per_expert]
        announced = torch.tensor(sent, device=rows.device)
        received = torch.empty_like(announced)
        distributed.all_to_all_single(received, announced, group=self.group)
        return self._read_counts(sent, received.tolist())


@cache
def _chunk_orders(num_experts: int, ranks: int) -> tuple[list[int], list[int]]:
    """Chunks [source, expert] of what arrives in the order of the experts, and back."""
    by_expert = torch.arange(num_experts).reshape(ranks, -1).t().flatten()
    return by_expert.tolist(), by_expert.argsort().tolist()


def exchange_rows(rows: Any, sent: Sequence[int], received: Sequence[int], group: Any = None) -> Any:
    """All-to-all of rows, and of their gradients the other way.

    Args:
        rows: [R, ...]: first those for rank 0 of the group, then for rank 1, and so on.
        sent: rows for each rank, which sum to R.
        received: rows from each rank.
        group: process group; None is the whole world.

    Returns:
        [sum of received, ...] in the dtype of `rows`, by source rank.
    """
    return _ExchangeRows.apply(rows, tuple(sent), tuple(received), group)


class _ExchangeRows(torch.autograd.Function):
    """The backward of an exchange is the exchange of the gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Any, sent: tuple[int, ...], received: tuple[int, ...], group: Any) -> Any:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Any, None, None, None]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Any, sent: tuple[int, ...], received: tuple[int, ...], group: Any) -> Any:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


# --- jagged
#
# The jagged path with experts on several ranks: one node of the graph, in whose forward the host waits once.
#
#     sort by expert; numbers of rows, all-to-all | meanwhile rows are gathered; the host waits for the numbers
#     rows, all-to-all                            | meanwhile the order in which they will be needed is made
#     up, gate, down of the experts here
#     rows back, all-to-all; each token sums its rows, times their weights, in fp32
#
# The host needs numbers of rows because NCCL takes splits from it. The backward knows them and waits for nothing; the
# gradients of the experts' weights are computed while those of the rows fly back.
#
# The weight of an assignment stays with its token, where `bridge.jagged_experts` applies it before the last product: so
# nothing but rows is exchanged. The same function with one rounding at another place. Saved for the backward are what
# experts got, what the first product gave, and what came back.


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


class JaggedExchange(_Exchange):
    """Tokens through experts on several ranks, all ranks with or all without gradients."""

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
            TokensNotConserved: rows differ from what was sent (audit).
        """
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
        return self._read_counts(*flight.land().tolist())

    def order_arrived(self, received: Any, total: int) -> Order:
        """Where what arrives by source rank lies when it is sorted by expert, and within an expert by source.

        Args:
            received: int32 [E], rows by source rank and then by expert.
            total: their sum, on the host.
        """
        if self._chunk_experts is None:
            self._chunk_experts = torch.arange(self.local_experts, device=received.device).repeat(self.ranks)
        chosen = self._chunk_experts.repeat_interleave(received, output_size=total)
        return sort_by_expert(chosen.unsqueeze(1), self.local_experts)


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
        near = _rows_path(tokens, up_weight, down_weight)
        order = sort_by_expert(chosen, exchange.num_experts)
        flight = exchange.start_numbers(order.ends)
        rows = near.gather(tokens, order)
        numbers, received = exchange.hear(flight), flight.out[1]
        flight = start_rows(rows, numbers.sent, numbers.received, exchange.group)
        local = exchange.order_arrived(received, sum(numbers.received))
        moved = flight.land()
        exchange._compare("dispatch", rows, moved, numbers.counts)
        far = _rows_path(moved, up_weight, down_weight)
        arrived = far.gather(moved, local)
        del flight, rows, moved
        up = far.product(arrived, up_weight.transpose(1, 2), local, numbers.per_expert)
        out = far.product(far.gate(up), down_weight.transpose(1, 2), local, numbers.per_expert)
        back = far.combine(out, local)
        returned = start_rows(back, numbers.received, numbers.sent, exchange.group).land()
        exchange._compare("combine", back, returned, numbers.counts)
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


# --- rows
#
# The work of one rank on rows between exchanges: by the kernels of `bridge.jagged_experts`, which read on the device
# where rows end, or in plain torch, which takes every dtype and device and loops over experts by numbers that the host
# has. Both are the same mathematics with the same roundings, forward and backward written out: a gated expert without
# the weight of its assignment, which the rank of the token applies when it sums.
#
#     gather(tokens [T, D], order) -> rows [R, D]
#     combine(rows [R, D], order, weights [T, k] or None) -> [T, D], the weighted sum of each token's rows
#     combine_backward(grad [T, D], order, weights, rows) -> gradients of rows and of weights
#     gate(up [R, 2F]) -> silu(gate) x linear, [R, F]
#     gate_backward(up, of_inner [R, F]) -> gradient of up, and what gate gave once more
#     product(rows [R, K], weight [E, K, N], order, counts) -> rows[e] @ weight[e], [R, N]
#     weight_gradient(grad [R, N], rows [R, K], order, counts) -> grad[e]^T @ rows[e], [E, N, K], zeros without rows


_FUSED: Final = SimpleNamespace(
    gather=gather_rows,
    combine=combine_rows,
    combine_backward=combine_rows_backward,
    gate=gate_rows,
    gate_backward=lambda up, of_inner: gate_rows_backward(up, of_inner)[::2],
    product=lambda rows, weight, order, _: grouped_product(rows, weight, order.ends),
    weight_gradient=lambda grad, rows, order, _: zero_idle(grouped_product(grad.t(), rows, order.ends), order.ends),
)


class PlainRows:
    """In plain torch: sums in fp32 at least, rounded once; as listed above."""

    @staticmethod
    def gather(tokens: Any, order: Order) -> Any:  # noqa: D102
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


def _rows_path(rows: Any, up_weight: Any, down_weight: Any) -> Any:
    return PlainRows if why_not_fused(rows, up_weight, down_weight) else _FUSED


def _wide(rows: Any) -> Any:
    return torch.promote_types(rows.dtype, torch.float32)
