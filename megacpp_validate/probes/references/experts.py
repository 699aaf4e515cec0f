"""A bank of linear layers over rows sorted by expert: in fp64, and with operands in DeepGEMM's block scaling.

In block scaling every operand is rounded for the product at hand, and sums are in fp64.

| product              | left                                   | right                                   |
|----------------------|----------------------------------------|-----------------------------------------|
| output               | rows, 1 x 128 along the features       | weights, 128 x 128                      |
| gradient of the rows | gradient, 1 x 128 along the features   | weights, 128 x 128, transposed          |
| gradient of a weight | gradient^T, 1 x 128 along the tokens   | rows^T, 128 tokens x 128 features       |

Tokens are cut into blocks within an expert, whose last block is as long as what is left: padding with zeros changes no
scale. Every value is E4M3.

MoE dispatch, entry by entry: which token goes to which row, and the sums on the way back, in fp64.

The order of rows is by expert, and within an expert by token (Transformer Engine, pytorch/triton/permutation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

LARGEST_E4M3: Final = 448.0
SMALLEST_AMAX: Final = 1e-4  # DeepGEMM's casts take no less (deep_gemm/utils/math.py, 0.1.3)
BLOCK: Final = 128


def expert_bank(rows: Any, weights: Sequence[Any], counts: Sequence[int]) -> Any:
    """One linear layer an expert: [R, K] -> [R, N]; differentiable."""
    parts = rows.split(list(counts))
    return torch.cat([torch.einsum("rk,nk->rn", *pair) for pair in zip(parts, weights, strict=True)])


def block_scaled_experts(
    rows: Any, weights: Any, counts: Sequence[int], gradient: Any, *, power_of_two: bool = False
) -> dict[str, Any]:
    """The pass as exact sums of the very operands that the kernels multiply; fp64.

    Args:
        rows: [R, K].
        weights: [E, N, K].
        counts: rows of each expert, in order; they sum to R.
        gradient: of the output, [R, N].
        power_of_two: scales are powers of two.
    """
    w = torch.stack([round_blocks(weight, BLOCK, power_of_two) for weight in weights])
    x = round_blocks(rows, 1, power_of_two)
    g = round_blocks(gradient, 1, power_of_two)
    out, of_rows, of_weights = [], [], []
    first = 0
    for expert, count in enumerate(counts):
        own = slice(first, first + count)
        out.append(torch.einsum("rk,nk->rn", x[own], w[expert]))
        of_rows.append(torch.einsum("rn,nk->rk", g[own], w[expert]))
        across = round_blocks(gradient[own].T, 1, power_of_two)
        tokens = round_blocks(rows[own], BLOCK, power_of_two)
        of_weights.append(torch.einsum("nr,rk->nk", across, tokens))
        first += count
    grads = {f"grad.weight{expert}": weight for expert, weight in enumerate(of_weights)}
    return {"forward": torch.cat(out), "grad.rows": torch.cat(of_rows), **grads}


def round_blocks(values: Any, high: int, power_of_two: bool = False) -> Any:
    """A matrix in E4M3 with one scale for each `high` x 128 of it, and back, in fp64; the last blocks may be smaller.

    Scale fp32 amax / 448 of each block, not below 1e-4 / 448; rounded up to 2^n where only those can be held.
    """
    plain = values.detach().float()
    tall, wide = plain.shape
    filled = functional.pad(plain, (0, -wide % BLOCK, 0, -tall % high))
    blocks = filled.reshape(filled.shape[0] // high, high, filled.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=SMALLEST_AMAX) * (1.0 / LARGEST_E4M3)
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    rounded = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).double() * scale.double()
    return rounded.reshape(filled.shape)[:tall, :wide]


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
