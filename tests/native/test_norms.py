"""Norms against their formulas in fp64, and NormLinear against the names of the real LayerNormLinear."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_validate.native.norms import INIT_STD, LayerNorm, NormLinear, RMSNorm, layer_norm, rms_norm
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


def test_both_norms_have_the_right_gradients() -> None:
    x, weight, bias = (part.requires_grad_() for part in make((3, 5)))
    assert torch.autograd.gradcheck(lambda *given: rms_norm(*given, eps=EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda *given: layer_norm(*given, eps=EPS), (x, weight, bias))


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


@pytest.mark.parametrize("damage", ["eps", "centred", "not centred", "unbiased", "weight dropped", "weight after one"])
def test_the_comparison_sees_a_wrong_norm(damage: str) -> None:
    """The bound of the test above, on norms that are wrong in one thing."""
    x, weight, bias = make((37, 33), torch.bfloat16, seed=3)
    exact = x.double(), weight.double(), bias.double()
    rms, layer = rms_formula(*exact[:2]), layer_formula(*exact)
    width = x.shape[-1]
    wrong, wanted = {
        "eps": (rms_norm(x, weight, eps=0.5), rms),
        "centred": (layer_norm(x, weight, None, eps=EPS), rms),
        "not centred": (rms_norm(x, weight, eps=EPS) + bias, layer),
        "unbiased": (layer_norm(x, weight, None, eps=EPS) * ((width - 1) / width) ** 0.5 + bias, layer),
        "weight dropped": (rms_norm(x, torch.ones_like(weight), eps=EPS), rms),
        "weight after one": (rms_norm(x, weight + 1, eps=EPS), rms),
    }[damage]
    roundings = Roundings((("bf16", 2),), width)
    assert not compare(damage, wrong, wanted, roundings=roundings).passed


@pytest.mark.parametrize(("rows", "weights"), [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16")])
def test_mixed_dtypes_keep_the_dtype_of_the_rows(rows: str, weights: str) -> None:
    x, weight, bias = make((6, 48))
    x, weight, bias = x.to(DTYPES[rows]), weight.to(DTYPES[weights]), bias.to(DTYPES[weights])
    exact = x.double(), weight.double(), bias.double()
    once = Roundings(((rows, 1),), 48)
    for seen, wanted in (
        (rms_norm(x, weight, eps=EPS), rms_formula(*exact[:2])),
        (layer_norm(x, weight, bias, eps=EPS), layer_formula(*exact)),
    ):
        assert seen.dtype == x.dtype
        assert compare("mixed", seen, wanted, roundings=once).passed


def test_fp64_rows_stay_fp64_beside_a_narrow_weight() -> None:
    x, weight, _ = make((4, 9))
    seen = rms_norm(x, weight.bfloat16(), eps=EPS)
    torch.testing.assert_close(seen, rms_formula(x, weight.bfloat16().double()), rtol=1e-13, atol=1e-13)


def test_squares_do_not_overflow_in_fp16() -> None:
    x = torch.full((2, 64), 3e4, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, torch.ones(64, dtype=torch.float16), eps=EPS), torch.ones_like(x))


def test_strided_rows_give_what_contiguous_ones_give() -> None:
    x, weight, bias = make((6, 10, 16))
    strided = x.transpose(0, 1)
    assert not strided.is_contiguous()
    torch.testing.assert_close(rms_norm(strided, weight, eps=EPS), rms_formula(strided, weight))
    torch.testing.assert_close(layer_norm(strided, weight, bias, eps=EPS), layer_formula(strided, weight, bias))


def test_a_row_of_zeros_is_finite_with_its_gradient() -> None:
    x = torch.zeros(1, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), eps=EPS).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((1, 8), EPS**-0.5))


def test_modules_start_as_the_plain_norm() -> None:
    x, _, _ = make((5, 24), torch.float32)
    torch.testing.assert_close(RMSNorm(24)(x), rms_norm(x, torch.ones(24), eps=EPS))
    torch.testing.assert_close(LayerNorm(24)(x), layer_norm(x, torch.ones(24), torch.zeros(24), eps=EPS))
    assert RMSNorm(24, dtype=torch.bfloat16, device="meta").weight.is_meta
    assert [name for name, _ in LayerNorm(24).named_parameters()] == ["weight", "bias"]


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


def test_norm_linear_starts_where_the_real_one_does(wheel_of: Callable[[str], Path]) -> None:
    with zipfile.ZipFile(wheel_of("2.20.2")) as archive:
        module = archive.read("transformer_engine/pytorch/module/layernorm_linear.py").decode()
        defaults = archive.read("transformer_engine/pytorch/utils.py").decode()
    for name in ("layer_norm_weight", "layer_norm_bias"):
        assert re.search(rf'register_parameter\(\s*"{name}"', module)
    assert re.search(r'self\.weight_names = \["weight"\]', module)
    assert re.search(r"def get_default_init_method\(\).*?init_method_normal\(([\d.]+)\)", defaults, re.S).group(
        1
    ) == str(INIT_STD)
    torch.manual_seed(0)
    weight = NormLinear(256, 256).weight
    # The sample deviation of n normal values scatters by 1 / sqrt(2 n) of itself; six of those.
    assert abs(weight.std().item() / INIT_STD - 1) < 6 / (2 * weight.numel()) ** 0.5


def test_wrong_input_is_refused_with_the_next_step() -> None:
    with pytest.raises(ValueError, match=r"\(8,\).*\(2, 9\).*Build the norm with the width"):
        rms_norm(torch.ones(2, 9), torch.ones(8), eps=EPS)
    with pytest.raises(ValueError, match="takes rows"):
        layer_norm(torch.ones(2, 9), torch.ones(2, 9), None, eps=EPS)
    with pytest.raises(ValueError, match=r"'rmsnorm'.*RMSNorm, LayerNorm"):
        NormLinear(4, 4, normalization="rmsnorm")


@pytest.mark.parametrize("eps", [float("nan"), -1.0, float("inf"), True, "1e-5"])
@pytest.mark.parametrize("layer", [RMSNorm, LayerNorm, lambda width, eps: NormLinear(width, 4, eps=eps)])
def test_an_eps_that_gives_nan_is_refused(layer: Callable[..., Any], eps: Any) -> None:
    with pytest.raises(ValueError, match=r"eps is .*finite number from 0 up"):
        layer(4, eps=eps)


@pytest.mark.parametrize("layer", [RMSNorm, LayerNorm, lambda width: NormLinear(width, 4), lambda n: NormLinear(4, n)])
@pytest.mark.parametrize("width", [0, -1])
def test_a_layer_without_a_width_is_refused(layer: Callable[..., Any], width: int) -> None:
    with pytest.raises(ValueError, match=rf"={width}: each is 1 or more"):
        layer(width)
