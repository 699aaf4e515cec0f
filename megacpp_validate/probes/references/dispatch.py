"""MoE dispatch, entry by entry: which token goes to which row, and the sums on the way back, in fp64.

The order of rows is by expert, and within an expert by token (Transformer Engine, pytorch/triton/permutation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """One row: whose copy it is, and for whom."""

    token: int
    expert: int


def entries(routing_map: Any, capacity: int | None = None) -> list[Entry]:
    """The rows of a routing map [T, E] in order; an expert takes its first `capacity` tokens."""
    table = routing_map.tolist()
    found: list[Entry] = []
    for expert in range(routing_map.shape[1]):
        mine = [Entry(token, expert) for token, row in enumerate(table) if row[expert]]
        found += mine if capacity is None else mine[:capacity]
    return found


def count(rows: Sequence[Entry], experts: int) -> list[int]:
    """Rows of each expert."""
    return [sum(1 for entry in rows if entry.expert == expert) for expert in range(experts)]


def places(counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Where each row lies when expert e's rows begin at sizes[0] + ... + sizes[e - 1]."""
    found: list[int] = []
    for expert, number in enumerate(counts):
        first = sum(sizes[:expert])
        found += range(first, first + number)
    return found


def copied(tokens: Any, rows: Sequence[Entry]) -> Any:
    """Tokens [T, D] as rows [R, D], bit by bit, in the dtype of the tokens."""
    return tokens.detach()[[entry.token for entry in rows]]


def picked(probs: Any, rows: Sequence[Entry]) -> Any:
    """Probabilities [T, E] of the rows, [R]."""
    return probs.detach()[[entry.token for entry in rows], [entry.expert for entry in rows]]


def put_back(values: Any, rows: Sequence[Entry], shape: Any) -> Any:
    """Values of the rows [R] at their token and expert, zeros elsewhere: `shape` is [T, E]."""
    back = torch.zeros(tuple(shape), dtype=values.dtype, device=values.device)
    back[[entry.token for entry in rows], [entry.expert for entry in rows]] = values.detach()
    return back


def spread(values: Any, where: Sequence[int], total: int, filling: float = 0.0) -> Any:
    """Rows [R, ...] at the given places among `total`, and `filling` in the others."""
    laid = torch.full((total, *values.shape[1:]), filling, dtype=values.dtype, device=values.device)
    laid[list(where)] = values.detach()
    return laid


def summed(values: Any, rows: Sequence[Entry], tokens: int, weights: Any = None) -> Any:
    """Rows [R, D] summed into their tokens [T, D] in fp64, each times weights[token, expert] where there are any."""
    out = torch.zeros(tokens, values.shape[1], dtype=torch.float64, device=values.device)
    wide = values.detach().double()
    for number, entry in enumerate(rows):
        weight = 1.0 if weights is None else weights.detach()[entry.token, entry.expert].double()
        out[entry.token] += weight * wide[number]
    return out


def reordered(values: Any, sizes: Sequence[int], order: Sequence[int]) -> Any:
    """Chunks of rows, cut by `sizes`, with chunk order[0] first, then order[1], and so on."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    rows = [row for chunk in order for row in range(ends[chunk] - sizes[chunk], ends[chunk])]
    return values.detach()[rows]
