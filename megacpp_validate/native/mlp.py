"""Gated and plain feed-forward layers, alone and behind a norm.

The activations are those of Transformer Engine's LayerNormMLP, by the names and formulas of its kernels: GELU is the
tanh approximation, and the FIRST half of a gated layer's width goes through the activation while the second is
multiplied with it (TE, pytorch/ops/basic/activation.py; `torch.nn.functional.glu` has it the other way round). TE
before 2.13 has no "glu", and its ONNX export writes other formulas than its kernels for geglu, qgelu and qgeglu.

Sources: Hendrycks & Gimpel 2016, arXiv:1606.08415 (GELU, quick GELU); Shazeer 2020, arXiv:2002.05202 (gated variants);
So et al. 2021, arXiv:2109.08668 (squared ReLU); the clamped SwiGLU is that of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from .norms import INIT_STD, Normalization, check_eps, layer_norm, rms_norm

PlainActivation = Literal["gelu", "qgelu", "relu", "srelu", "silu"]
GatedActivation = Literal["geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"]
Activation = PlainActivation | GatedActivation

# Transformer Engine's defaults of `activation_params` (LayerNormMLP).
CLAMP_LIMIT: Final = 7.0
CLAMP_ALPHA: Final = 1.702
CLAMP_OFFSET: Final = 1.0


def _gelu(x: Any) -> Any:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Any) -> Any:
    return functional.relu(x).square()


PLAIN: Final[dict[str, Callable[[Any], Any]]] = {
    "gelu": _gelu,
    "qgelu": _quick_gelu,
    "relu": functional.relu,
    "srelu": _squared_relu,
    "silu": functional.silu,
}
GATES: Final[dict[str, Callable[[Any], Any]]] = {
    "geglu": _gelu,
    "glu": torch.sigmoid,
    "qgeglu": _quick_gelu,
    "reglu": functional.relu,
    "sreglu": _squared_relu,
    "swiglu": functional.silu,
}


def is_gated(name: str) -> bool:
    """Whether the activation halves the width; ValueError where there is none of that name."""
    if name in get_args(GatedActivation):
        return True
    if name in PLAIN:
        return False
    raise ValueError(
        f"no activation is called {name!r}; plain ones are {', '.join(PLAIN)}, gated ones "
        f"{', '.join(get_args(GatedActivation))}."
    )


def activation(x: Any, name: PlainActivation) -> Any:
    """A plain activation, [..., F] -> [..., F], in the dtype of `x`."""
    if is_gated(name):
        raise ValueError(f"{name!r} halves the width: call gated_activation, whose input is [..., 2F].")
    return PLAIN[name](x)


def gated_activation(x: Any, name: GatedActivation) -> Any:
    """act(first half) x second half, [..., 2F] -> [..., F], each operation in the dtype of `x`."""
    if not is_gated(name):
        raise ValueError(f"{name!r} has no gate: call activation, whose input is [..., F].")
    if x.shape[-1] % 2:
        raise ValueError(f"a gated activation halves the last axis, and {tuple(x.shape)} ends in an odd width.")
    gate, linear = x.chunk(2, dim=-1)
    if name == "clamped_swiglu":
        gate = gate.clamp(max=CLAMP_LIMIT)
        linear = linear.clamp(min=-CLAMP_LIMIT, max=CLAMP_LIMIT) + CLAMP_OFFSET
        return gate * torch.sigmoid(CLAMP_ALPHA * gate) * linear
    return GATES[name](gate) * linear


class MLP(nn.Module):
    """Up-projection, activation, down-projection.

    Args:
        hidden: width of the rows.
        ffn_hidden: width F between the projections.
        activation: which one; a gated one doubles the up-projection.
        dtype, device: of the parameters.
        bias: whether both projections add one.

    Attributes:
        fc1_weight: [F, hidden]; gated [2F, hidden], whose first half makes the gate.
        fc2_weight: [hidden, F].
        fc1_bias: [F] or [2F], or None.
        fc2_bias: [hidden], or None.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Activation = "swiglu",
        dtype: Any = None,
        device: Any = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.hidden, self.ffn_hidden, self.activation = hidden, ffn_hidden, activation
        up = 2 * ffn_hidden if is_gated(activation) else ffn_hidden
        made = {"dtype": dtype, "device": device}
        self.fc1_weight = nn.Parameter(torch.empty(up, hidden, **made))
        self.fc1_bias = nn.Parameter(torch.zeros(up, **made)) if bias else None
        self.fc2_weight = nn.Parameter(torch.empty(hidden, ffn_hidden, **made))
        self.fc2_bias = nn.Parameter(torch.zeros(hidden, **made)) if bias else None
        for weight in (self.fc1_weight, self.fc2_weight):
            nn.init.normal_(weight, std=INIT_STD)

    def forward(self, x: Any) -> Any:
        """[..., hidden] -> [..., hidden]."""
        up = functional.linear(x, self.fc1_weight, self.fc1_bias)
        act: Callable[[Any, Any], Any] = gated_activation if is_gated(self.activation) else activation
        return functional.linear(act(up, self.activation), self.fc2_weight, self.fc2_bias)


class NormMLP(MLP):
    """A norm, then the MLP: what Transformer Engine's LayerNormMLP computes, under its parameter names.

    Args:
        hidden, ffn_hidden, activation, dtype, device, bias: as `MLP` takes them.
        eps: of the norm.
        normalization: which norm.

    Attributes:
        layer_norm_weight: [hidden].
        layer_norm_bias: [hidden], or None for RMSNorm.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Activation = "swiglu",
        eps: float = 1e-5,
        dtype: Any = None,
        device: Any = None,
        normalization: Normalization = "RMSNorm",
        bias: bool = False,
    ) -> None:
        super().__init__(hidden, ffn_hidden, activation=activation, dtype=dtype, device=device, bias=bias)
        check_eps(eps)
        self.eps, self.normalization = eps, normalization
        shifted = normalization == "LayerNorm"
        made = {"dtype": dtype, "device": device}
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden, **made))
        self.layer_norm_bias = nn.Parameter(torch.zeros(hidden, **made)) if shifted else None

    def norm(self, x: Any) -> Any:
        """The norm alone, [..., hidden] -> the same shape and dtype."""
        if self.normalization == "RMSNorm":
            return rms_norm(x, self.layer_norm_weight, eps=self.eps)
        return layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, eps=self.eps)

    def forward(self, x: Any) -> Any:
        """[..., hidden] -> [..., hidden]."""
        return super().forward(self.norm(x))
