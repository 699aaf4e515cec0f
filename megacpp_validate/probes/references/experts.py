"""A bank of linear layers over rows sorted by expert, in fp64, one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


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
