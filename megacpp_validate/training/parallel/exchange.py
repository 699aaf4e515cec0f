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
from functools import cache, partial
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from ...bridge.features import PRODUCTION, Features
from ...bridge.permute import Dispatch
from .checks import check_rows, digest_chunks


class ExpertExchange:
    """Experts that are distributed over a group; every rank of the group runs forward and backward in the same order.

    Args:
        num_experts: E of the layer, divisible by the ranks; rank r of the group holds the experts from r * E / ranks
            on.
        group: process group; None is the whole world.
        features: whether Transformer Engine may sort chunks.
        audit: whether rows are compared with what was sent, bit by bit, in both directions of the forward. The host
            then waits for the device; a run that is timed does without.
    """

    def __init__(
        self, num_experts: int, *, group: Any = None, features: Features = PRODUCTION, audit: bool = False
    ) -> None:
        self.group, self.num_experts, self.audit = group, num_experts, audit
        self.ranks = distributed.get_world_size(group)
        self._sorting = Dispatch(num_experts, features=features)

    def exchange_counts(self, counts: Any) -> tuple[list[int], list[int]]:
        """Numbers of rows, on the host, which waits once.

        Args:
            counts: int64 [E] on the device, rows for each expert of the layer.

        Returns:
            `counts`, and [E] rows that arrive here: by source rank, and then by expert.
        """
        both = torch.stack([counts, counts])
        distributed.all_to_all_single(both[1], both[0], group=self.group)
        sent, received = both.tolist()
        return sent, received

    def run(self, rows: Any, sent: list[int], received: list[int], bank: Callable[[Any, Sequence[int]], Any]) -> Any:
        """Dispatch, the expert bank of this rank, combine: [R, D] -> [R, D'].

        Args:
            rows: [R, D] sorted by expert, as `Dispatch.permute` lays them out; R may be 0.
            sent, received: of `exchange_counts`.
            bank: rows [R', D] by expert and E / ranks numbers -> [R', D'], with a gradient also where R' is 0.

        Raises:
            TokensNotConserved: rows differ from what was sent (audit).
        """
        to_rank, from_rank = ([sum(counts) for counts in self._by_rank(of)] for of in (sent, received))
        moved = exchange_rows(rows, to_rank, from_rank, self.group)
        self._compare("dispatch", (rows, sent), (moved, received))
        by_expert, back_by_source = _chunk_orders(self.num_experts, self.ranks)
        ordered, _ = self._sorting.sort_chunks(moved, received, by_expert)
        out = bank(ordered, [sum(counts) for counts in zip(*self._by_rank(received), strict=True)])
        back, _ = self._sorting.sort_chunks(out, [received[chunk] for chunk in by_expert], back_by_source)
        returned = exchange_rows(back, from_rank, to_rank, self.group)
        self._compare("combine", (back, received), (returned, sent))
        return returned

    def _by_rank(self, counts: Sequence[int]) -> list[Sequence[int]]:
        """[E] -> [ranks][E / ranks]."""
        each = self.num_experts // self.ranks
        return [counts[first : first + each] for first in range(0, self.num_experts, each)]

    def _compare(self, stage: str, sent: tuple[Any, list[int]], arrived: tuple[Any, list[int]]) -> None:
        """Compare rows with those that left their rank; a collective call, where audited.

        Args:
            stage: as `check_rows` takes it.
            sent, arrived: rows, and the numbers of rows of their chunks.

        Raises:
            TokensNotConserved: chunks differ from what their rank sent.
        """
        if self.audit:
            mine = digest_chunks(*sent)
            expected = torch.empty_like(mine)
            distributed.all_to_all_single(expected, mine, group=self.group)
            check_rows(stage, expected, digest_chunks(*arrived), self.group)


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
    there, back = list(sent), list(received)
    return Collective.apply(rows, partial(_exchange, there, back), partial(_exchange, back, there), group)


def _exchange(sent: list[int], received: list[int], rows: Any, group: Any) -> Any:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class Collective(torch.autograd.Function):
    """A collective whose backward pass is another one, `back`; both take a tensor and a group."""

    @staticmethod
    def forward(ctx: Any, rows: Any, ahead: Any, back: Any, group: Any) -> Any:
        """`ahead(rows, group)`."""
        ctx.back, ctx.group = back, group
        return ahead(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None, None]:
        """`back(gradient, group)`."""
        return ctx.back(gradient, ctx.group), None, None, None
