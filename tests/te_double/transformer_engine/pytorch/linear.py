"""`Linear` and `LayerNormLinear`: one weight, which may lie in pieces."""

from __future__ import annotations

from typing import Any

import torch

from .gemm import Gemm
from .layer import TransformerEngineBaseModule, check_alone, check_fp8_shape
from .rmsnorm import add_norm, normalize


class _Linear(Gemm):
    """The name that the graph shows."""


class _LayerNormLinear(Gemm):
    """The name that the graph shows."""


class _OneGemm(TransformerEngineBaseModule):
    """Shared by `Linear` and `LayerNormLinear`: one weight [out_features, in_features], which may lie in pieces."""

    def __init__(
        self, in_features: int, out_features: int, split: Any, bias: bool, dtype: Any, device: Any,
        norm: str = "",
    ) -> None:  # fmt: skip
        super().__init__(num_gemms=1)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        if split is None:
            pieces = {"weight": out_features}
        elif isinstance(split, dict):
            pieces = {f"{name.rstrip('_')}_weight": size for name, size in split.items()}
        else:
            pieces = {f"{name.rstrip('_')}_weight": out_features // len(split) for name in split}
        if not pieces or sum(pieces.values()) != out_features:
            raise ValueError(f"Trying to split weight buffer (out_features={out_features}) with split sizes {pieces}")
        if norm:
            add_norm(self, in_features, norm, dtype, device)
        self.weight_names = list(pieces)
        self.bias_names = self.add_weights(pieces, in_features, bias, dtype, device)

    def multiply(self, inp: Any, is_first_microbatch: bool | None, gemm: type[Gemm]) -> Any:
        """[..., in_features] -> [..., out_features]."""
        if inp.shape[-1] != self.in_features:
            raise AssertionError("GEMM not possible")
        rounder, last = self.start(inp, is_first_microbatch)
        weight = self._join(self.weight_names)
        if rounder is not None:
            check_fp8_shape(inp, weight)
        bias = self._join(self.bias_names) if self.use_bias else None
        out = gemm.apply(self.norm(inp.reshape(-1, self.in_features)), weight, bias, rounder, 0, last)
        return out.view(*inp.shape[:-1], self.out_features)

    def norm(self, rows: Any) -> Any:
        """Rows [R, in_features] as they go into the product."""
        return rows

    def _join(self, names: list[str]) -> Any:
        """Pieces of a parameter as one tensor."""
        pieces = [getattr(self, name) for name in names]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Linear(_OneGemm):
    """[..., in_features] -> [..., out_features]; weight [out_features, in_features]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: Any = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        name: str | None = None,
        **alone: Any,
    ) -> None:
        check_alone(alone)
        super().__init__(in_features, out_features, parameters_split, bias, params_dtype, device)
        self.name = name

    def forward(self, inp: Any, is_first_microbatch: bool | None = None) -> Any:
        """[..., in_features] -> [..., out_features]."""
        return self.multiply(inp, is_first_microbatch, _Linear)


class LayerNormLinear(_OneGemm):
    """Norm, then [..., in_features] -> [..., out_features]; layer_norm_weight, weight or its split pieces."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: Any = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        **alone: Any,
    ) -> None:
        check_alone(alone)
        super().__init__(in_features, out_features, parameters_split, bias, params_dtype, device, normalization)
        self.eps, self.normalization = eps, normalization

    def forward(self, inp: Any, is_first_microbatch: bool | None = None) -> Any:
        """[..., in_features] -> [..., out_features]."""
        return self.multiply(inp, is_first_microbatch, _LayerNormLinear)

    def norm(self, rows: Any) -> Any:
        """Rows [R, in_features], normalized."""
        return normalize(rows, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.normalization)
