"""A bank of linear layers over rows sorted by expert, in fp64, one expert after the other; and DeepGEMM's rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

LARGEST_E4M3: Final = 448.0
SMALLEST_AMAX: Final = 1e-4  # DeepGEMM's casts take no less (deep_gemm/utils/math.py, 0.1.3)
BLOCK: Final = 128


@dataclass(frozen=True)
class ExpertsReference:
    """What a bank gives for rows [R, K], weights [E, N, K] and a gradient [R, N], in fp64.

    Attributes:
        out: [R, N].
        rows: gradient of the rows, [R, K].
        weights: gradient of each weight, E of [N, K]; zeros for an expert without rows.
    """

    out: Any
    rows: Any
    weights: tuple[Any, ...]


def reference_experts(rows: Any, weights: Any, counts: Sequence[int], gradient: Any) -> ExpertsReference:
    """Output and gradients from the rounded operands.

    Args:
        rows: [R, K].
        weights: [E, N, K].
        counts: rows of each expert, in order; they sum to R.
        gradient: of the output, [R, N].
    """
    out, of_rows, of_weights = [], [], []
    first = 0
    for expert, count in enumerate(counts):
        x = rows[first : first + count].detach().double()
        g = gradient[first : first + count].detach().double()
        w = weights[expert].detach().double()
        out.append(torch.einsum("rk,nk->rn", x, w))
        of_rows.append(torch.einsum("rn,nk->rk", g, w))
        of_weights.append(torch.einsum("rn,rk->nk", g, x))
        first += count
    return ExpertsReference(torch.cat(out), torch.cat(of_rows), tuple(of_weights))


def round_rows(rows: Any, *, power_of_two: bool = False) -> Any:
    """Rows [R, K] after DeepGEMM's cast to E4M3 with one scale for each 1 x 128 values, and back, in fp64."""
    return _round_blocks(rows, 1, power_of_two)


def round_weights(weights: Any, *, power_of_two: bool = False) -> Any:
    """Weights [E, N, K] after its cast with one scale for each 128 x 128 values of an expert, and back, in fp64."""
    return torch.stack([_round_blocks(weight, BLOCK, power_of_two) for weight in weights])


def _round_blocks(values: Any, high: int, power_of_two: bool) -> Any:
    """Scale fp32 amax / 448 of each block, not below 1e-4 / 448; rounded up to 2^n where only those can be held."""
    plain = values.detach().float()
    rounded = torch.empty_like(plain, dtype=torch.float64)
    for top in range(0, plain.shape[0], high):
        for left in range(0, plain.shape[1], BLOCK):
            at = (slice(top, top + high), slice(left, left + BLOCK))
            block = plain[at]
            scale = block.abs().amax().clamp(min=SMALLEST_AMAX) / LARGEST_E4M3
            if power_of_two:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            rounded[at] = (block * (1.0 / scale)).to(torch.float8_e4m3fn).double() * scale.double()
    return rounded
