"""`GroupedLinear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .gemm import Gemm
from .layer import TransformerEngineBaseModule

ALIGN = 16  # rows of a group in FP8


class _GroupedLinear(Gemm):
    """The name that the graph shows."""


class GroupedLinear(TransformerEngineBaseModule):
    """Rows [R, in_features] in `num_gemms` groups -> [R, out_features]; weight0, weight1, ..."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: Any = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__(num_gemms)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias = bias
        weights = {f"weight{expert}": out_features for expert in range(num_gemms)}
        self.add_weights(weights, in_features, bias, params_dtype, device)

    def forward(self, inp: Any, m_splits: Sequence[int] | Any, is_first_microbatch: bool | None = None) -> Any:
        """Rows [R, in_features] with `m_splits` summing to R -> [R, out_features]."""
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if len(sizes) != self.num_gemms:
            raise ValueError(f"Shape of splits ({len(sizes)}) does not match number of GEMMs ({self.num_gemms}).")
        if inp.shape[-1] != self.in_features:
            raise AssertionError("GEMM not possible")
        rows = inp.reshape(-1, self.in_features)
        if sum(sizes) != rows.shape[0]:
            raise RuntimeError(f"split_sizes {sizes} do not sum to {rows.shape[0]} rows")
        rounder, last = self.start(inp, is_first_microbatch)
        if rounder is not None and any(size % ALIGN for size in (*sizes, self.in_features, self.out_features)):
            raise ValueError(f"FP8 needs groups and features in multiples of {ALIGN}, not {sizes}")
        outs = [
            _GroupedLinear.apply(
                part, getattr(self, f"weight{expert}"), getattr(self, f"bias{expert}") if self.use_bias else None,
                rounder, expert, last and expert == 0,
            )
            for expert, part in enumerate(rows.split(sizes))
        ]  # fmt: skip
        return torch.cat(outs).view(*inp.shape[:-1], self.out_features)
