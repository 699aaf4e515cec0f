"""Activations and MLPs against scalar formulas in fp64 and against the real LayerNormMLP of Transformer Engine."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from megacpp_validate.native.mlp import (
    MLP,
    GatedActivation,
    NormMLP,
    PlainActivation,
    activation,
    gated_activation,
    is_gated,
)
from megacpp_validate.probes.bounds import Roundings, compare

PLAIN, GATED = get_args(PlainActivation), get_args(GatedActivation)
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# One value at a time, as the docstrings of TE's pytorch/ops/basic/activation.py write them.
SCALAR: dict[str, Callable[[float], float]] = {
    "gelu": tanh_gelu,
    "qgelu": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: max(x, 0.0),
    "srelu": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x * sigmoid(x),
}
GATE_OF = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def scalar_gated(name: str, gate: float, linear: float) -> float:
    if name == "glu":
        return sigmoid(gate) * linear
    if name == "clamped_swiglu":
        gate, linear = min(gate, 7.0), max(-7.0, min(linear, 7.0))
        return gate * sigmoid(1.702 * gate) * (linear + 1.0)
    return SCALAR[GATE_OF[name]](gate) * linear


def by_scalars(x: Any, name: str) -> Any:
    rows = x.double().reshape(-1, x.shape[-1]).tolist()
    if name in PLAIN:
        out = [[SCALAR[name](value) for value in row] for row in rows]
    else:
        half = x.shape[-1] // 2
        out = [[scalar_gated(name, *pair) for pair in zip(row[:half], row[half:], strict=True)] for row in rows]
    return torch.tensor(out, dtype=torch.float64).reshape(*x.shape[:-1], -1)


def act(x: Any, name: Any) -> Any:
    return gated_activation(x, name) if name in GATED else activation(x, name)


def make(*shape: int, dtype: Any = torch.float64, seed: int = 0, spread: float = 3.0) -> Any:
    """Wide enough that clamps bite."""
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=source, dtype=torch.float64) * spread).to(dtype)


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 34), (64,)])
def test_an_activation_is_its_formula(name: str, shape: tuple[int, ...]) -> None:
    x = make(*shape)
    torch.testing.assert_close(act(x, name), by_scalars(x, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_low_precision_lies_within_its_roundings(name: str, dtype: str) -> None:
    x = make(65, 66, dtype=LOW[dtype], spread=1.0)
    # Each operation rounds: at most four (clamped SwiGLU: product, sigmoid, product, product).
    check = compare(name, act(x, name), by_scalars(x, name), roundings=Roundings(((dtype, 4),), 1))
    assert check.passed, check


def read_te(wheel_of: Callable[[str], Path], path: str) -> str:
    with zipfile.ZipFile(wheel_of("2.20.2")) as archive:
        return archive.read(f"transformer_engine/{path}").decode()


def fill(layer: Any) -> None:
    """Weights of a size at which every part of the layer counts."""
    source = torch.Generator().manual_seed(7)
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        parameter.data.copy_(drawn / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else drawn)


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_is_its_formula(name: Any, bias: bool) -> None:
    layer = MLP(6, 10, activation=name, dtype=torch.float64, bias=bias)
    fill(layer)
    x = make(3, 7, 6, spread=1.0)
    up = torch.einsum("...i,oi->...o", x, layer.fc1_weight) + (layer.fc1_bias if bias else 0.0)
    wanted = torch.einsum("...i,oi->...o", act(up, name), layer.fc2_weight) + (layer.fc2_bias if bias else 0.0)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-12, atol=1e-12)
    assert layer.fc1_weight.shape == (20 if is_gated(name) else 10, 6)
    assert torch.autograd.gradcheck(layer, (x[:, :2].requires_grad_(),))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_norm_mlp_is_a_norm_and_an_mlp_under_the_real_names(
    normalization: Any, bias: bool, wheel_of: Callable[[str], Path]
) -> None:
    layer = NormMLP(6, 10, dtype=torch.float64, eps=0.3, normalization=normalization, bias=bias)
    fill(layer)
    x = make(4, 6, spread=1.0)
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    normed = centred * (centred.square().mean(-1, keepdim=True) + 0.3) ** -0.5 * layer.layer_norm_weight
    if normalization == "LayerNorm":
        normed = normed + layer.layer_norm_bias
    torch.testing.assert_close(layer.norm(x), normed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x), MLP.forward(layer, normed), rtol=1e-12, atol=1e-12)

    names = {name for name, _ in layer.named_parameters()}
    shifts = ({"layer_norm_bias"} if normalization == "LayerNorm" else set()) | (
        {"fc1_bias", "fc2_bias"} if bias else set()
    )
    assert names == {"layer_norm_weight", "fc1_weight", "fc2_weight"} | shifts
    theirs = read_te(wheel_of, "pytorch/module/layernorm_mlp.py")
    assert all(re.search(rf'register_parameter\(\s*"{name}"', theirs) for name in names)
