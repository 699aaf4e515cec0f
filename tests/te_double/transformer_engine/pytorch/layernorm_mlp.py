"""`LayerNormMLP`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional

from .gemm import Gemm
from .layer import TransformerEngineBaseModule, check_alone, check_fp8_shape
from .rmsnorm import add_norm, normalize


class _LayerNormMLP(Gemm):
    """The name that the graph shows."""


def _gelu(rows: Any) -> Any:
    return functional.gelu(rows, approximate="tanh")


def _squared_relu(rows: Any) -> Any:
    return functional.relu(rows).square()


_PLAIN: dict[str, Callable[[Any], Any]] = {"gelu": _gelu, "srelu": _squared_relu}
# A gated one applies this to the first half of fc1's rows and multiplies by the second.
_GATED: dict[str, Callable[[Any], Any]] = {"geglu": _gelu, "swiglu": functional.silu}


def activate(rows: Any, name: str) -> Any:
    """The activation in fp32, returned in the dtype of the rows."""
    wide = rows.float()
    if name in _PLAIN:
        return _PLAIN[name](wide).to(rows.dtype)
    gate, linear = wide.chunk(2, dim=-1)
    return (_GATED[name](gate) * linear).to(rows.dtype)


class LayerNormMLP(TransformerEngineBaseModule):
    """Norm, fc1, activation, fc2: [..., hidden] -> [..., hidden]."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        params_dtype: Any = None,
        device: Any = "cuda",
        **alone: Any,
    ) -> None:
        check_alone(alone)
        if activation not in _PLAIN and activation not in _GATED:
            raise NotImplementedError(f"the double of Transformer Engine has no activation {activation!r}")
        super().__init__(num_gemms=2)
        self.hidden_size, self.eps, self.activation, self.use_bias = hidden_size, eps, activation, bias
        self.normalization = normalization
        add_norm(self, hidden_size, normalization, params_dtype, device)
        wide = ffn_hidden_size * (2 if activation in _GATED else 1)
        self.add_weights({"fc1_weight": wide}, hidden_size, bias, params_dtype, device)
        self.add_weights({"fc2_weight": hidden_size}, ffn_hidden_size, bias, params_dtype, device)

    def forward(self, inp: Any, is_first_microbatch: bool | None = None) -> Any:
        """[..., hidden] -> [..., hidden]."""
        if inp.shape[-1] != self.hidden_size:
            raise AssertionError("GEMM not possible")
        rounder, last = self.start(inp, is_first_microbatch)
        if rounder is not None:
            check_fp8_shape(inp, self.fc1_weight, self.fc2_weight)
        biases = (self.fc1_bias, self.fc2_bias) if self.use_bias else (None, None)
        rows = inp.reshape(-1, self.hidden_size)
        rows = normalize(rows, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.normalization)
        rows = _LayerNormMLP.apply(rows, self.fc1_weight, biases[0], rounder, 0, last)
        rows = _LayerNormMLP.apply(activate(rows, self.activation), self.fc2_weight, biases[1], rounder, 1, False)
        return rows.view(inp.shape)
