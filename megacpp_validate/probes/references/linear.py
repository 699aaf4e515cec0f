"""A linear layer and its gradients in fp64, written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LinearReference:
    """What a linear layer gives for rows [R, K], a weight [N, K] and a gradient [R, N], in fp64.

    Attributes:
        out: [R, N].
        rows: gradient of the rows, [R, K].
        weight: gradient of the weight, [N, K].
        bias: gradient of the bias, [N].
    """

    out: Any
    rows: Any
    weight: Any
    bias: Any


def reference_linear(rows: Any, weight: Any, bias: Any, gradient: Any) -> LinearReference:
    """Output and gradients from the rounded operands.

    Args:
        rows: [..., K].
        weight: [N, K].
        bias: [N], or None.
        gradient: of the output, [..., N].
    """
    x, w = rows.detach().double().reshape(-1, rows.shape[-1]), weight.detach().double()
    g = gradient.detach().double().reshape(-1, gradient.shape[-1])
    out = torch.einsum("rk,nk->rn", x, w)
    if bias is not None:
        out = out + bias.detach().double()
    return LinearReference(
        out=out.reshape(gradient.shape),
        rows=torch.einsum("rn,nk->rk", g, w).reshape(rows.shape),
        weight=torch.einsum("rn,rk->nk", g, x),
        bias=torch.einsum("rn->n", g),
    )
