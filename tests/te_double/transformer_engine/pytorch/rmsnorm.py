"""`RMSNorm`, and the norms that the fused layers share with it."""

from __future__ import annotations

from typing import Any

import torch

from .gemm import Mark
from .layer import DTYPES


class _RMSNorm(Mark):
    """The name that the graph shows."""


def normalize(rows: Any, weight: Any, bias: Any, eps: float, kind: str) -> Any:
    """Norm over the last axis in fp32, returned in the dtype of the rows."""
    wide = rows.float()
    if kind == "LayerNorm":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    wide = wide * weight.float()
    return (wide if bias is None else wide + bias.float()).to(rows.dtype)


def add_norm(layer: Any, hidden: int, kind: str, dtype: Any, device: Any) -> None:
    """Register layer_norm_weight [hidden], and layer_norm_bias where the norm has one."""
    if kind not in ("LayerNorm", "RMSNorm"):
        raise AssertionError("Unsupported normalization type!")
    dtype = dtype or torch.get_default_dtype()
    layer.layer_norm_weight = torch.nn.Parameter(torch.ones(hidden, dtype=dtype, device=device))
    if kind == "LayerNorm":
        layer.layer_norm_bias = torch.nn.Parameter(torch.zeros(hidden, dtype=dtype, device=device))
    else:
        layer.layer_norm_bias = None


class RMSNorm(torch.nn.Module):
    """[..., hidden] -> [..., hidden]; weight [hidden]."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        params_dtype: Any = None,  # the older name of dtype
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype or params_dtype))

    def forward(self, inp: Any) -> Any:
        """[..., hidden] -> [..., hidden]."""
        if inp.dtype not in DTYPES:
            raise KeyError(inp.dtype)
        return _RMSNorm.apply(normalize(inp, self.weight, None, self.eps, "RMSNorm"))
