"""TE expert GEMM wrapper: the MoE expert bank as grouped linear layers; the TE side of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import imports as te

NATIVE_PATH = "a grouped matmul of plain torch"


class TeExpertBank:
    """One linear layer an expert: rows sorted by expert [R, in_features] -> [R, out_features].

    Args:
        num_experts: experts on this rank.
        in_features, out_features: of each expert.
        dtype, device: of the parameters.
    """

    def __init__(self, *, num_experts: int, in_features: int, out_features: int, dtype: Any, device: Any) -> None:
        self.num_experts = num_experts
        self.inner = te.grouped_linear.require()(
            num_gemms=num_experts,
            in_features=in_features,
            out_features=out_features,
            bias=False,
            params_dtype=dtype,
            device=device,
        )

    def __call__(self, rows: Any, rows_per_expert: Sequence[int], *, is_first_microbatch: bool | None = None) -> Any:
        """Rows [R, in_features] with `rows_per_expert` summing to R -> [R, out_features]."""
        return self.inner(rows, list(rows_per_expert), is_first_microbatch=is_first_microbatch)

    def weight_of(self, expert: int) -> Any:
        """Weight [out_features, in_features] of one expert."""
        return getattr(self.inner, f"weight{expert}")
