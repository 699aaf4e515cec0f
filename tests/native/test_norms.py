"""Norms against their formulas in fp64, and NormLinear against the names of the real LayerNormLinear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.native.norms import NormLinear, layer_norm, rms_norm
from megacpp_validate.probes.bounds import Roundings, compare

EPS = 1e-5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = [(1, 8), (5, 3, 33), (2, 7, 64), (0, 16), (512,)]


def rms_formula(x: Any, weight: Any, eps: float = EPS) -> Any:
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x * (mean_square + eps) ** -0.5 * weight


def layer_formula(x: Any, weight: Any, bias: Any, eps: float = EPS) -> Any:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centred * centred).sum(-1, keepdim=True) / x.shape[-1]
    return centred * (variance + eps) ** -0.5 * weight + bias


def make(shape: tuple[int, ...], dtype: Any = torch.float64, seed: int = 0) -> tuple[Any, Any, Any]:
    """Rows with a mean that is not zero, a scale and a shift."""
    source = torch.Generator().manual_seed(seed)
    width = shape[-1]
    x = torch.randn(shape, generator=source, dtype=torch.float64) * 2 + 0.5
    weight = torch.rand(width, generator=source, dtype=torch.float64) + 0.5
    bias = torch.randn(width, generator=source, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_norms_are_their_formulas(shape: tuple[int, ...]) -> None:
    x, weight, bias = make(shape)
    torch.testing.assert_close(rms_norm(x, weight, eps=EPS), rms_formula(x, weight), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        layer_norm(x, weight, bias, eps=EPS), layer_formula(x, weight, bias), rtol=1e-13, atol=1e-13
    )
    torch.testing.assert_close(
        layer_norm(x, weight, None, eps=EPS), layer_formula(x, weight, 0.0), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_low_precision_rounds_once_forward_and_backward(name: str, kind: str) -> None:
    given = make((37, 129), DTYPES[name], seed=1)
    given = given if kind == "layer" else given[:2]
    upstream = make((37, 129), DTYPES[name], seed=2)[0]
    norm: Callable[..., Any] = layer_norm if kind == "layer" else rms_norm
    formula = layer_formula if kind == "layer" else rms_formula

    low = [part.clone().requires_grad_() for part in given]
    exact = [part.double().requires_grad_() for part in given]
    seen, wanted = norm(*low, eps=EPS), formula(*exact)
    seen.backward(upstream)
    wanted.backward(upstream.double())

    once = Roundings(((name, 1),), 129, why="the result")
    assert compare("out", seen, wanted, roundings=once).passed
    for index, (one, other) in enumerate(zip(low, exact, strict=True)):
        check = compare(f"gradient {index}", one.grad, other.grad, roundings=once)
        assert check.passed, check


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_linear_is_norm_then_linear(normalization: Any, bias: bool) -> None:
    torch.manual_seed(0)
    layer = NormLinear(12, 20, dtype=torch.float64, normalization=normalization, bias=bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = make((3, 7, 12))[0]
    normed = (
        rms_formula(x, layer.layer_norm_weight)
        if normalization == "RMSNorm"
        else layer_formula(x, layer.layer_norm_weight, layer.layer_norm_bias)
    )
    wanted = torch.einsum("...i,oi->...o", normed, layer.weight) + (layer.bias if bias else 0.0)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.norm(x), normed, rtol=1e-12, atol=1e-12)
    names = {name for name, _ in layer.named_parameters()}
    shifted = {"layer_norm_bias"} if normalization == "LayerNorm" else set()
    assert names == {"layer_norm_weight", "weight"} | shifted | ({"bias"} if bias else set())
