"""Expert parallelism: rows go to the rank that holds their expert, and come back (all-to-all).

Source: Lepikhin et al. 2021, GShard, arXiv:2006.16668, section 3.2, without its capacity: splits are uneven, and a rank
or an expert may get nothing. The numbers of rows are exchanged first, so the host waits for the device once a layer.

What one rank computes is reproduced. The rows of an expert arrive in the order of the ranks of the group, and within a
rank by token: where the ranks read neighbouring sequences (`ParallelPlan.sequences`) that is the order that one rank
has them in. So each expert multiplies the same rows in the same order, and each token sums its experts in the same
order: outputs, gradients of tokens and of experts are bitwise those of one rank, where a matrix product of the same
operands is. What is summed over ranks only then (the router's gradient, and an expert's over expert_data) is the same
terms in another order, and differs by at most 2 (n - 1) u sum |term| (Higham 2002, section 4.2; n terms, u the unit
roundoff).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from ...bridge.features import PRODUCTION, Features
from ...bridge.permute import Dispatch
from ...native.permute import check_counts
from ..errors import TrainingError
from .token_counts import RowDigest, TokenCounts, digest_chunks, refuse_difference


class WrongExchange(TrainingError, ValueError):
    """Experts or rows that cannot be exchanged."""


@dataclass(frozen=True, eq=False)
class Arrived:
    """Rows at the rank of their experts.

    Attributes:
        rows: [R', D] by expert of this rank, within an expert by rank of the group, and within a rank by token.
        rows_per_expert: [E / ranks] numbers that sum to R'.
        counts: what was sent and received, for the record.
        sizes: rows of each chunk as it arrived, by source rank and then by expert.
    """

    rows: Any
    rows_per_expert: tuple[int, ...]
    counts: TokenCounts
    sizes: tuple[int, ...]


class ExpertExchange:
    """Sends rows to experts that are shared out over a group, and takes them back.

    Every rank of the group calls `dispatch` and `combine` in the same order, and runs the backward of both.

    Args:
        num_experts: E of the layer; rank r of the group holds the experts from r * E / ranks on.
        group: process group; None is the whole world.
        features: whether Transformer Engine may sort the chunks.
        audit: whether what arrives is compared with what was sent, bit by bit, in each direction. The host then waits
            for the device; a run that is timed does without.

    Attributes:
        counts: of the last dispatch; None before the first.

    Raises:
        WrongExchange: experts that cannot be shared out evenly.
    """

    def __init__(
        self, num_experts: int, *, group: Any = None, features: Features = PRODUCTION, audit: bool = False
    ) -> None:
        self.group, self.num_experts, self.audit = group, num_experts, audit
        self.ranks, self.rank = distributed.get_world_size(group), distributed.get_rank(group)
        if num_experts < 1 or num_experts % self.ranks:
            raise WrongExchange(
                f"{num_experts} experts cannot be shared out over {self.ranks} ranks. Next step: make expert_parallel "
                "a divisor of num_experts."
            )
        self.local_experts = num_experts // self.ranks
        self.counts: TokenCounts | None = None
        self._sorting = Dispatch(num_experts, features=features)
        # Chunk [source, expert] of what arrives, in the order of the experts; and the way back.
        by_source = torch.arange(num_experts).reshape(self.ranks, self.local_experts)
        self._by_expert: list[int] = by_source.t().flatten().tolist()
        self._by_source: list[int] = by_source.t().flatten().argsort().tolist()

    def dispatch(self, rows: Any, rows_per_expert: Sequence[int] | Any) -> Arrived:
        """Send each row to the rank of its expert.

        Args:
            rows: [R, D] sorted by expert, as `Dispatch.permute` lays them out; R may be 0.
            rows_per_expert: E numbers that sum to R.

        Returns:
            What arrived; where any rank of the group needs a gradient, its rows need one here too.

        Raises:
            WrongExchange: numbers that are not E, or do not fit the rows.
            TokensNotConserved: what arrived is not what was sent (audit).
        """
        sent = _whole(rows, rows_per_expert, self.num_experts)
        digests = digest_chunks(rows, sent) if self.audit else None
        came, expected, wanted = self._tell(rows, sent, digests)
        if wanted and not rows.requires_grad:
            rows = rows.detach().requires_grad_()  # its backward is an exchange too, and the others wait for it
        sizes = tuple(count for source in came for count in source)
        moved = exchange_rows(rows, self._per_rank(sent), [sum(source) for source in came], self.group)
        if expected is not None:
            refuse_difference("dispatch", expected, digest_chunks(moved, sizes), self.group)
        ordered, _ = self._sorting.sort_chunks(moved, sizes, self._by_expert)
        self.counts = TokenCounts(tuple(sent), came)
        return Arrived(ordered, tuple(map(sum, zip(*came, strict=True))), self.counts, sizes)

    def combine(self, rows: Any, arrived: Arrived) -> Any:
        """Send what the experts made of the rows back, [R', D'] -> [R, D'] in the order of `dispatch`.

        Raises:
            WrongExchange: another number of rows than arrived.
            TokensNotConserved: what came back is not what was sent back (audit).
        """
        _whole(rows, arrived.rows_per_expert, self.local_experts)
        sorted_sizes = [arrived.sizes[chunk] for chunk in self._by_expert]
        back, _ = self._sorting.sort_chunks(rows, sorted_sizes, self._by_source)
        returned = exchange_rows(
            back, [sum(source) for source in arrived.counts.received], self._per_rank(arrived.counts.sent), self.group
        )
        if self.audit:
            announced = torch.empty(self.num_experts, dtype=torch.int64, device=rows.device)
            distributed.all_to_all_single(announced, digest_chunks(back, arrived.sizes).values, group=self.group)
            seen = digest_chunks(returned, arrived.counts.sent)
            refuse_difference("combine", RowDigest(announced), seen, self.group)
        return returned

    def run(self, rows: Any, rows_per_expert: Sequence[int] | Any, bank: Callable[[Any, Sequence[int]], Any]) -> Any:
        """Dispatch, the expert bank of this rank, combine: [R, D] -> [R, D'].

        Args:
            rows, rows_per_expert: as `dispatch` takes them.
            bank: rows [R', D] by expert and E / ranks numbers -> [R', D'], with a gradient also where R' is 0.
        """
        arrived = self.dispatch(rows, rows_per_expert)
        return self.combine(bank(arrived.rows, arrived.rows_per_expert), arrived)

    def _tell(
        self, rows: Any, sent: Sequence[int], digests: RowDigest | None
    ) -> tuple[tuple[tuple[int, ...], ...], RowDigest | None, bool]:
        """Exchange numbers of rows, digests where there are any, and whether a gradient is wanted."""
        wants = torch.is_grad_enabled() and rows.requires_grad
        announced = torch.tensor(sent, device=rows.device).reshape(self.ranks, self.local_experts)
        parts = [announced, torch.full_like(announced[:, :1], int(wants))]
        if digests is not None:
            parts.append(digests.values.reshape(self.ranks, self.local_experts))
        asked = torch.cat(parts, dim=1)
        received_all = torch.empty_like(asked)
        distributed.all_to_all_single(received_all, asked, group=self.group)
        came = received_all.tolist()  # the host waits here
        counts = tuple(tuple(source[: self.local_experts]) for source in came)
        expected = RowDigest(received_all[:, self.local_experts + 1 :].flatten()) if digests is not None else None
        return counts, expected, torch.is_grad_enabled() and any(source[self.local_experts] for source in came)

    def _per_rank(self, sent: Sequence[int]) -> list[int]:
        return [sum(sent[first : first + self.local_experts]) for first in range(0, len(sent), self.local_experts)]


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


def _whole(rows: Any, rows_per_expert: Sequence[int] | Any, experts: int) -> list[int]:
    """The numbers on the host."""
    counts = [int(count) for count in rows_per_expert]
    try:
        check_counts(rows, counts)
    except ValueError as fault:
        raise WrongExchange(str(fault)) from fault
    if len(counts) != experts:
        raise WrongExchange(f"{len(counts)} numbers of rows for {experts} experts. Next step: pass one an expert.")
    return counts
