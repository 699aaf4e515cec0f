"""Layers of every kind that share scopes of delayed scaling, each operand of its own size, so that mix-ups show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..bench import Bench

ROWS: Final = 32  # of a call, or of an expert; FP8 products take multiples of 16
WIDTH: Final = 64
OUT: Final = 96
EXPERTS: Final = 3
# Steps between experts: operands of one state lie apart by more than the half unit of E5M2, 1/8.
ROWS_APART: Final = 4.0
WEIGHTS_APART: Final = 64.0
GRADIENTS_APART: Final = 8.0


@dataclass(frozen=True)
class ScopeLayer:
    """One layer.

    Attributes:
        name: for the checks.
        module: of Transformer Engine.
        gemms: G, products of its forward pass; expert or place of each is its index.
        splits: rows of each expert; empty where there is one group.
        out: features of its output.
    """

    name: str
    module: Any
    gemms: int
    out: int
    splits: tuple[int, ...] = ()

    def rows(self, bench: Bench, factor: float) -> Any:
        """[R, WIDTH] bf16, a leaf."""
        return self._sample(bench, WIDTH, factor, ROWS_APART).requires_grad_()

    def gradient(self, bench: Bench, factor: float) -> Any:
        """[R, out] bf16, of the output."""
        return self._sample(bench, self.out, factor, 1.0 / GRADIENTS_APART)

    def __call__(self, rows: Any) -> Any:
        """[R, WIDTH] -> [R, out]."""
        return self.module(rows, list(self.splits)) if self.splits else self.module(rows)

    def _sample(self, bench: Bench, width: int, factor: float, apart: float) -> Any:
        groups = [
            bench.randn(count, width, dtype=torch.bfloat16) * (factor * apart**index)
            for index, count in enumerate(self.splits or (ROWS,))
        ]
        return torch.cat(groups)


def new_layers(bench: Bench) -> Sequence[ScopeLayer]:
    """`Linear`, `LayerNormLinear`, `LayerNormMLP` and `GroupedLinear`, with weights of their own."""
    te, common = bench.bridge("imports"), {"bias": False, "params_dtype": torch.bfloat16, "device": bench.device}
    norm = {"normalization": "RMSNorm", "eps": 1e-5, **common}
    layers = (
        ScopeLayer("linear", te.linear.require()(WIDTH, OUT, **common), 1, OUT),
        ScopeLayer("norm-linear", te.layernorm_linear.require()(WIDTH, OUT, **norm), 1, OUT),
        ScopeLayer(
            "mlp",
            te.layernorm_mlp.require()(hidden_size=WIDTH, ffn_hidden_size=OUT, activation="swiglu", **norm),
            2,
            WIDTH,
        ),
        ScopeLayer(
            "experts", te.grouped_linear.require()(EXPERTS, WIDTH, OUT, **common), EXPERTS, OUT, (ROWS,) * EXPERTS
        ),
    )
    with torch.no_grad():
        for layer in layers:
            weights = [value for value in layer.module.parameters() if value.dim() > 1]
            for index, weight in enumerate(weights):
                size = weight.shape[-1] ** -0.5 * WEIGHTS_APART**index
                weight.copy_(bench.randn(*weight.shape, scale=size))
    return layers
