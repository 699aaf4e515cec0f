"""RMSNorm, alone and in front of a linear layer.

Statistics are taken in fp32 at least, whatever the input's dtype; the result is rounded once, to that dtype.

Source: Zhang & Sennrich 2019, arXiv:1910.07467. Parameters have the names that Transformer Engine's RMSNorm and
LayerNormLinear give them, and start where theirs do.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

# --- norms ---

# Transformer Engine's default for linear weights (utils.get_default_init_method), so that a layer that falls back to
# the native path starts from the same distribution.
INIT_STD: Final = 0.023


def rms_norm(x: Any, weight: Any, *, eps: float) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Args:
        x: [..., D], any floating dtype.
        weight: [D], of the same dtype as `x` or another.
        eps: added to the mean square.

    Returns:
        [..., D] in the dtype of `x`, computed in fp32 at least.
    """
    wide = _wide(x, weight)
    return functional.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def _wide(x: Any, weight: Any) -> Any:
    """The dtype that the fused operator is given.

    On CUDA it keeps its statistics in fp32 where both are of one low-precision dtype. Mixed ones it refuses, or takes a
    slow path with a warning. Those are promoted first.
    """
    if x.is_cuda and x.dtype == weight.dtype:
        return x.dtype
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def check_eps(eps: float) -> None:
    """Refuse an eps under which a norm gives NaN, or zeros (ValueError)."""
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0.0 <= eps < math.inf:
        raise ValueError(f"eps is {eps!r}: it is added to a variance, so it is a finite number from 0 up.")


class RMSNorm(nn.Module):
    """RMSNorm with a learned scale `weight` [hidden]."""

    def __init__(self, hidden: int, *, eps: float = 1e-5, dtype: Any = None, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype, device=device))

    def forward(self, x: Any) -> Any:
        """[..., hidden] -> the same shape and dtype."""
        return rms_norm(x, self.weight, eps=self.eps)


class NormLinear(nn.Module):
    """RMSNorm, then a linear layer: what Transformer Engine's LayerNormLinear computes, under its parameter names.

    Args:
        in_features: width of the rows.
        out_features: width of what comes out.
        eps: of the norm.
        dtype, device: of the parameters.

    Attributes:
        layer_norm_weight: [in_features].
        weight: [out_features, in_features].
    """

    def __init__(
        self, in_features: int, out_features: int, *, eps: float = 1e-5, dtype: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=dtype, device=device))
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=INIT_STD)

    def norm(self, x: Any) -> Any:
        """The norm alone, [..., in_features] -> the same shape and dtype."""
        return rms_norm(x, self.layer_norm_weight, eps=self.eps)

    def forward(self, x: Any) -> Any:
        """[..., in_features] -> [..., out_features]."""
        return functional.linear(self.norm(x), self.weight)


# --- autocast ---
# What promises a dtype keeps it inside an autocast region too.

_KINDS = ("cuda", "cpu")


def without_autocast(tensor: Any) -> AbstractContextManager[Any]:
    """A region in which products run in the dtype of their operands, on the kind of device that `tensor` lies on.

    Nothing is entered where no autocast is on: that costs more than to ask.
    """
    kind = tensor.device.type
    if kind in _KINDS and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
