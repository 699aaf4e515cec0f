"""`LayerNormLinear`."""

from __future__ import annotations

from typing import Any

import torch

from .gemm import Gemm
from .layer import TransformerEngineBaseModule, check_fp8_shape, only_defaults
from .linear import add_split_weights, joined
from .rmsnorm import normalize


class _LayerNormLinear(Gemm):
    """The name that the graph shows."""


def add_norm(layer: Any, hidden: int, kind: str, zero_centered: bool, dtype: Any, device: Any) -> None:
    """Register layer_norm_weight [hidden], and layer_norm_bias where the norm has one."""
    if kind not in ("LayerNorm", "RMSNorm"):
        raise AssertionError("Unsupported normalization type!")
    start = torch.zeros if zero_centered else torch.ones
    dtype = dtype or torch.get_default_dtype()
    layer.layer_norm_weight = torch.nn.Parameter(start(hidden, dtype=dtype, device=device))
    if kind == "LayerNorm":
        layer.layer_norm_bias = torch.nn.Parameter(torch.zeros(hidden, dtype=dtype, device=device))
    else:
        layer.layer_norm_bias = None


class LayerNormLinear(TransformerEngineBaseModule):
    """Norm, then [..., in_features] -> [..., out_features]; layer_norm_weight, weight or its split pieces."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        done = ("eps", "bias", "normalization", "params_dtype", "parameters_split", "zero_centered_gamma", "device",
                "init_method", "name")  # fmt: skip
        only_defaults(LayerNormLinear.__init__, locals(), done)
        super().__init__(num_gemms=1)
        self.in_features, self.out_features, self.use_bias, self.eps = in_features, out_features, bias, eps
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        add_norm(self, in_features, normalization, zero_centered_gamma, params_dtype, device)
        self.weight_names, self.bias_names = add_split_weights(
            self, out_features, in_features, parameters_split, bias, params_dtype, device
        )

    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """[..., in_features] -> [..., out_features]."""
        only_defaults(LayerNormLinear.forward, locals(), ("is_first_microbatch",))
        if inp.shape[-1] != self.in_features:
            raise AssertionError("GEMM not possible")
        rounder, last = self.start(inp, is_first_microbatch)
        weight = joined(self, self.weight_names)
        if rounder is not None:
            check_fp8_shape(inp, weight)
        bias = joined(self, self.bias_names) if self.use_bias else None
        rows = inp.reshape(-1, self.in_features)
        rows = normalize(
            rows, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.normalization, self.zero_centered_gamma
        )
        out = _LayerNormLinear.apply(rows, weight, bias, rounder, 0, last)
        return out.view(*inp.shape[:-1], self.out_features)
