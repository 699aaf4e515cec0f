"""Gated and plain feed-forward layers, alone and behind a norm.

The activations are those of Transformer Engine's LayerNormMLP that the probes hold to a formula, by the names and
formulas of its kernels: GELU is the tanh approximation, and the FIRST half of a gated layer's width goes through the
activation while the second is multiplied with it (TE, pytorch/ops/basic/activation.py; `torch.nn.functional.glu` has it
the other way round). TE's ONNX export before 2.13 writes another formula than its kernels for geglu.

Sources: Hendrycks & Gimpel 2016, arXiv:1606.08415 (GELU); Shazeer 2020, arXiv:2002.05202 (gated variants); So et al.
2021, arXiv:2109.08668 (squared ReLU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from .norms import INIT_STD, rms_norm

Activation = Literal["gelu", "geglu", "srelu", "swiglu"]


def _gelu(x: Any) -> Any:
    return functional.gelu(x, approximate="tanh")


def _squared_relu(x: Any) -> Any:
    return functional.relu(x).square()


PLAIN: Final[dict[str, Callable[[Any], Any]]] = {"gelu": _gelu, "srelu": _squared_relu}
GATES: Final[dict[str, Callable[[Any], Any]]] = {"geglu": _gelu, "swiglu": functional.silu}


def is_gated(name: str) -> bool:
    """Whether the activation halves the width; ValueError where there is none of that name."""
    if name not in PLAIN and name not in GATES:
        raise ValueError(
            f"no activation is called {name!r}; plain ones are {', '.join(PLAIN)}, gated ones {', '.join(GATES)}."
        )
    return name in GATES


def activation(x: Any, name: Activation) -> Any:
    """A plain activation, [..., F] -> [..., F]; a gated one, act(first half) x second half, [..., 2F] -> [..., F].

    Each operation rounds to the dtype of `x`.
    """
    if not is_gated(name):
        return PLAIN[name](x)
    gate, linear = x.chunk(2, dim=-1)
    return GATES[name](gate) * linear


class MLP(nn.Module):
    """Up-projection, activation, down-projection.

    Args:
        hidden: width of the rows.
        ffn_hidden: width F between the projections.
        activation: which one; a gated one doubles the up-projection.
        dtype, device: of the parameters.

    Attributes:
        fc1_weight: [F, hidden]; gated [2F, hidden], whose first half makes the gate.
        fc2_weight: [hidden, F].
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Activation = "swiglu",
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.hidden, self.ffn_hidden, self.activation = hidden, ffn_hidden, activation
        up = 2 * ffn_hidden if is_gated(activation) else ffn_hidden
        made = {"dtype": dtype, "device": device}
        self.fc1_weight = nn.Parameter(torch.empty(up, hidden, **made))
        self.fc2_weight = nn.Parameter(torch.empty(hidden, ffn_hidden, **made))
        for weight in (self.fc1_weight, self.fc2_weight):
            nn.init.normal_(weight, std=INIT_STD)

    def forward(self, x: Any) -> Any:
        """[..., hidden] -> [..., hidden]."""
        up = functional.linear(x, self.fc1_weight)
        return functional.linear(activation(up, self.activation), self.fc2_weight)


class NormMLP(MLP):
    """RMSNorm, then the MLP: what Transformer Engine's LayerNormMLP computes, under its parameter names.

    Args:
        hidden, ffn_hidden, activation, dtype, device: as `MLP` takes them.
        eps: of the norm.

    Attributes:
        layer_norm_weight: [hidden].
    """

    def __init__(
        self, hidden: int, ffn_hidden: int, *, activation: Activation = "swiglu", eps: float = 1e-5, **more: Any
    ) -> None:
        super().__init__(hidden, ffn_hidden, activation=activation, **more)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(self.fc1_weight.new_ones(hidden))

    def norm(self, x: Any) -> Any:
        """The norm alone, [..., hidden] -> the same shape and dtype."""
        return rms_norm(x, self.layer_norm_weight, eps=self.eps)

    def forward(self, x: Any) -> Any:
        """[..., hidden] -> [..., hidden]."""
        return super().forward(self.norm(x))
