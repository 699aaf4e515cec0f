"""Whether tokens are conserved on their way to the experts and back: counts on every rank, and the bits of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import distributed

from ..errors import TrainingError

# Odd, so that a product with it loses nothing modulo 2^64; the golden ratio's, as in Knuth, TAOCP 6.4.
_SPREAD: Final = -7046029254386353131
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN: Final = 4


class TokensNotConserved(TrainingError, ArithmeticError):
    """Rows that are lost, doubled, at another expert, or not the rows that were sent.

    Attributes:
        faults: each with the expert and the ranks.
    """

    def __init__(self, text: str, faults: tuple[str, ...]) -> None:
        super().__init__(text)
        self.faults = faults


@dataclass(frozen=True)
class TokenCounts:
    """What one rank sent and received in one dispatch.

    Attributes:
        sent: [E] rows for each expert of the layer.
        received: [ranks][E / ranks] rows from each rank of the group for each expert of this one.
    """

    sent: tuple[int, ...]
    received: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class RowDigest:
    """Chunks of rows as numbers: [C] int64, 0 for a chunk without rows."""

    values: Any


def digest_chunks(rows: Any, sizes: Sequence[int]) -> RowDigest:
    """A number of 64 bits for each chunk, of the bits of its rows and of their order.

    The bits of element i of a chunk, as a whole number, are multiplied by an odd number of their own, (2 i + 1) times
    `_SPREAD`, and summed modulo 2^64: a single element that is another always shows, rows that are swapped or lost do
    but by a chance of about 2^-64.

    Args:
        rows: [R, D], any dtype.
        sizes: rows of each chunk, which sum to R.
    """
    numbers = rows.detach().contiguous().view(_INTEGERS[rows.element_size()]).to(torch.int64)
    width, device = rows.shape[1], rows.device
    counts = torch.tensor(list(sizes), dtype=torch.int64, device=device)
    chunk = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts, output_size=rows.shape[0])
    first = counts.cumsum(0) - counts
    place = torch.arange(rows.shape[0], device=device) - first[chunk]
    index = place.unsqueeze(1) * width + torch.arange(width, device=device)
    weighted = ((numbers + 1) * ((2 * index + 1) * _SPREAD)).sum(dim=1)
    return RowDigest(torch.zeros(len(sizes), dtype=torch.int64, device=device).index_add(0, chunk, weighted))


def refuse_difference(stage: Literal["dispatch", "combine"], expected: RowDigest, seen: RowDigest, group: Any) -> None:
    """Refuse chunks that are not what their rank sent: a collective call, that raises on all ranks or on none.

    Args:
        stage: in a dispatch the E chunks of a rank are by source rank and then by its own experts, in a combine by
            expert of the layer.
        expected, seen: [E] what the sender had, and what is here.
        group: process group; None is the whole world.

    Raises:
        TokensNotConserved: each chunk at fault is named.
    """
    ranks, experts = distributed.get_world_size(group), expected.values.numel()
    differs = (expected.values != seen.values).to(torch.int64)
    each, faults = experts // ranks, []
    for place in gather_equal(differs, group).flatten().nonzero().flatten().tolist():
        rank, chunk = divmod(place, experts)
        other, local = divmod(chunk, each)
        expert = rank * each + local if stage == "dispatch" else chunk
        faults.append(f"rows of expert {expert} from rank {other} to rank {rank}")
    if faults:
        raise TokensNotConserved(
            f"{stage}: {_first(faults)} are not what was sent. Likely cause: rows that were dropped, swapped or "
            "overwritten between the router and the experts. Next step: compare the sizes of the chunks and the order "
            "in which they are sorted on both ranks.",
            tuple(faults),
        )


def gather_equal(mine: Any, group: Any = None) -> Any:
    """Tensors of one shape of all ranks, [...] -> [ranks, ...].

    By `all_gather`, under whose name every release of torch has it; the one into a whole tensor was renamed in 2.13.
    """
    parts = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, mine, group=group)
    return torch.stack(parts)


def check_conservation(counts: TokenCounts, routing_map: Any, group: Any = None) -> tuple[int, ...]:
    """Refuse a dispatch in which the rows at the experts are not those that the routers gave them.

    A collective call: every rank of the group makes it, and all raise or none does.

    Args:
        counts: of this rank's last dispatch.
        routing_map: [T, E] bool, of this rank's router.
        group: process group; None is the whole world.

    Returns:
        [E] rows of each expert, over the group.

    Raises:
        TokensNotConserved: on every rank, with the experts and ranks at fault.
    """
    ranks, experts = distributed.get_world_size(group), len(counts.sent)
    routed = routing_map.sum(dim=0).to(torch.int64)
    mine = torch.stack([routed, routed.new_tensor(counts.sent)])
    flat = routed.new_tensor([count for source in counts.received for count in source])
    table = gather_equal(torch.cat([mine.flatten(), flat]), group).reshape(ranks, 3, experts).tolist()
    each, faults = experts // ranks, []
    for expert in range(experts):
        owner, local = divmod(expert, each)
        for source in range(ranks):
            by_router, sent = table[source][0][expert], table[source][1][expert]
            received = table[owner][2][source * each + local]
            if not by_router == sent == received:
                faults.append(
                    f"expert {expert}: the router of rank {source} gave it {by_router} row(s), rank {source} sent "
                    f"{sent}, rank {owner} received {received}"
                )
    if faults:
        raise TokensNotConserved(
            f"tokens are not conserved: {_first(faults)}. Likely cause: a dispatch by another routing map than the "
            "router's, or sizes of another step. Next step: pass both the same routing.",
            tuple(faults),
        )
    return tuple(sum(table[source][0][expert] for source in range(ranks)) for expert in range(experts))


def share_of_balance_loss(probs: Any, routing_map: Any, group: Any = None) -> Any:
    """This rank's part of the load-balancing loss over the tokens of all ranks; the parts sum to the loss of one rank.

    The loss is E * sum_e f_e P_e (`native.router.load_balancing_loss`). f_e has no gradient and is counted over the
    group; P_e is a mean, of which a rank has its own terms. So no gradient crosses ranks, and gradients of the parts
    are summed over them, not averaged.

    Args:
        probs: [T, E] softmax over all experts, of this rank's tokens; T may be 0.
        routing_map: [T, E] bool.
        group: those that read other tokens of the same batch; None is the whole world.

    Returns:
        [] in the dtype of `probs`.
    """
    experts = probs.shape[1]
    seen = torch.cat([routing_map.sum(dim=0), routing_map.new_full((1,), 1, dtype=torch.int64) * probs.shape[0]])
    distributed.all_reduce(seen, group=group)
    assigned, tokens = seen[:-1].to(probs.dtype), seen[-1].clamp(min=1).to(probs.dtype)
    return experts * (assigned / assigned.sum().clamp(min=1) * probs.sum(dim=0)).sum() / tokens


def _first(faults: Sequence[str]) -> str:
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more
