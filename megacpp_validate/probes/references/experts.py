"""A bank of linear layers over rows sorted by expert: in fp64, and with operands in DeepGEMM's block scaling.

In block scaling every operand is rounded for the product at hand, and sums are in fp64.

| product              | left                                   | right                                   |
|----------------------|----------------------------------------|-----------------------------------------|
| output               | rows, 1 x 128 along the features       | weights, 128 x 128                      |
| gradient of the rows | gradient, 1 x 128 along the features   | weights, 128 x 128, transposed          |
| gradient of a weight | gradient^T, 1 x 128 along the tokens   | rows^T, 128 tokens x 128 features       |

Tokens are cut into blocks within an expert, whose last block is as long as what is left: padding with zeros changes no
scale. Every value is E4M3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

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
