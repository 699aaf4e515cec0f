"""`Linear`, and the split weights that `LayerNormLinear` shares with it."""

from __future__ import annotations

from typing import Any

import torch

from .gemm import Gemm
from .layer import TransformerEngineBaseModule, check_fp8_shape, only_defaults


class _Linear(Gemm):
    """The name that the graph shows."""


def add_split_weights(
    layer: TransformerEngineBaseModule, rows: int, columns: int, split: Any, bias: bool, dtype: Any, device: Any
) -> tuple[list[str], list[str]]:
    """Register weight [rows, columns] (and bias), in pieces where a split is given; the names of both."""
    if split is None:
        pieces = {"": rows}
    elif isinstance(split, dict):
        pieces = {f"{name.rstrip('_')}_": size for name, size in split.items()}
    else:
        pieces = {f"{name.rstrip('_')}_": rows // len(split) for name in split}
    if not pieces or sum(pieces.values()) != rows:
        raise ValueError(f"Trying to split weight buffer (out_features={rows}) with split sizes {pieces}")
    dtype = dtype or torch.get_default_dtype()
    for name, size in pieces.items():
        layer.register_parameter(f"{name}weight", layer.new_weight(size, columns, dtype, device))
    for name, size in pieces.items():
        if bias:
            layer.register_parameter(f"{name}bias", torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=device)))
        else:
            setattr(layer, f"{name}bias", torch.empty(0, dtype=dtype, device=device))
    return [f"{name}weight" for name in pieces], [f"{name}bias" for name in pieces]


def joined(layer: Any, names: list[str]) -> Any:
    """Pieces of a parameter as one tensor."""
    pieces = [getattr(layer, name) for name in names]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Linear(TransformerEngineBaseModule):
    """[..., in_features] -> [..., out_features]; weight [out_features, in_features]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        only_defaults(
            Linear.__init__, locals(), ("bias", "params_dtype", "parameters_split", "device", "init_method", "name")
        )
        super().__init__(num_gemms=1)
        self.in_features, self.out_features, self.use_bias, self.name = in_features, out_features, bias, name
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
        only_defaults(Linear.forward, locals(), ("is_first_microbatch",))
        if inp.shape[-1] != self.in_features:
            raise AssertionError("GEMM not possible")
        rounder, last = self.start(inp, is_first_microbatch)
        weight = joined(self, self.weight_names)
        if rounder is not None:
            check_fp8_shape(inp, weight)
        bias = joined(self, self.bias_names) if self.use_bias else None
        out = _Linear.apply(inp.reshape(-1, self.in_features), weight, bias, rounder, 0, last)
        return out.view(*inp.shape[:-1], self.out_features)
