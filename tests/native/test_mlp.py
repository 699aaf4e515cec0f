"""Activations and MLPs against scalar formulas in fp64 and against the real LayerNormMLP of Transformer Engine."""

from __future__ import annotations

import ast
import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from megacpp_validate.native import mlp as module
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


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_an_activation_has_the_right_gradient(name: str) -> None:
    assert torch.autograd.gradcheck(lambda x: act(x, name), (make(3, 8).requires_grad_(),))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_low_precision_lies_within_its_roundings(name: str, dtype: str) -> None:
    x = make(65, 66, dtype=LOW[dtype], spread=1.0)
    # Each operation rounds: at most four (clamped SwiGLU: product, sigmoid, product, product).
    check = compare(name, act(x, name), by_scalars(x, name), roundings=Roundings(((dtype, 4),), 1))
    assert check.passed, check


@pytest.mark.parametrize("name", GATED)
def test_the_comparison_sees_the_halves_swapped(name: str) -> None:
    x = make(65, 66, dtype=torch.bfloat16, spread=1.0)
    seen = gated_activation(x.roll(33, dims=-1), name)
    assert not compare(name, seen, by_scalars(x, name), roundings=Roundings((("bf16", 4),), 1)).passed


@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_the_comparison_sees_another_activation(name: str) -> None:
    x = make(65, 66, dtype=torch.bfloat16, spread=1.0)
    for other in PLAIN if name in PLAIN else GATED:
        check = compare(other, act(x, other), by_scalars(x, name), roundings=Roundings((("bf16", 4),), 1))
        assert check.passed == (other == name), (other, check)


def test_the_exact_gelu_is_not_the_one() -> None:
    """The two differ by 3e-4 at most, which bf16 hides; fp64 does not."""
    x = make(1, 64)
    apart = (activation(x, "gelu") - torch.nn.functional.gelu(x)).abs().max()
    assert 1e-4 < apart < 1e-3


def read_te(wheel_of: Callable[[str], Path], path: str) -> str:
    with zipfile.ZipFile(wheel_of("2.20.2")) as archive:
        return archive.read(f"transformer_engine/{path}").decode()


def test_it_is_what_transformer_engine_exports(wheel_of: Callable[[str], Path]) -> None:
    """TE's own formulas in torch, run from the ONNX export of its real LayerNormMLP: the order of the halves."""
    tree = ast.parse(read_te(wheel_of, "pytorch/module/layernorm_mlp.py"))
    export = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "onnx_forward")
    wanted = {"act_params", "activation_map", "clamped_swiglu_limit", "clamped_swiglu_alpha", "clamped_swiglu_offset"}
    lines: list[ast.stmt] = [
        node
        for node in export.body
        if (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in wanted)
        or isinstance(node, ast.FunctionDef)
    ]
    theirs: dict[str, Any] = {"torch": torch, "self": SimpleNamespace(activation_params=None)}
    exec(compile(ast.Module(lines, type_ignores=[]), "layernorm_mlp.py", "exec"), theirs)
    exported = theirs["activation_map"]
    assert set(exported) == {*PLAIN, *GATED}
    x = make(5, 64)
    differing = {name for name in exported if not torch.allclose(exported[name](x), act(x, name), 1e-12, 1e-12)}
    # The export takes the exact GELU for one, and the tanh GELU for the quick one; the kernels' docstrings do not.
    assert differing == {"geglu", "qgelu", "qgeglu"}


def test_the_kernels_formulas_are_the_documented_ones(wheel_of: Callable[[str], Path]) -> None:
    text = read_te(wheel_of, "pytorch/ops/basic/activation.py")
    assert "Transformer Engine applies the gating function to the first half" in " ".join(text.split())
    for written in (r"\text{QGELU}(x) \approx x * \sigma(1.702 * x)", r"\text{GEGLU}(a,b) = \text{GELU}(a) * b",
                    r"\text{GELU}(x) \approx \frac{x}{2} \left( 1 + \tanh\left( 0.797x+0.036 x^3 \right) \right)",
                    r"\text{QGEGLU}(a,b) = \text{QGELU}(a) * b"):  # fmt: skip
        assert written in text


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


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_a_low_precision_norm_mlp_lies_within_its_roundings(name: Any, dtype: str) -> None:
    layer = NormMLP(64, 96, activation=name, dtype=LOW[dtype])
    fill(layer)
    exact = NormMLP(64, 96, activation=name, dtype=torch.float64)
    exact.load_state_dict({key: value.double() for key, value in layer.state_dict().items()})
    x, upstream = make(3, 33, 64, dtype=LOW[dtype], spread=1.0), make(3, 33, 64, dtype=LOW[dtype], seed=1)
    low, high = x.clone().requires_grad_(), x.double().requires_grad_()
    seen, wanted = layer(low), exact(high)
    seen.backward(upstream)
    wanted.backward(upstream.double())
    # Norm, up, two of the activation, down; backward each once more.
    forward, both = Roundings(((dtype, 5),), 96), Roundings(((dtype, 10),), 99)
    assert compare("out", seen, wanted, roundings=forward).passed
    assert compare("rows", low.grad, high.grad, roundings=both).passed
    for (what, one), other in zip(layer.named_parameters(), exact.parameters(), strict=True):
        check = compare(what, one.grad, other.grad, roundings=both)
        assert check.passed, check


def test_strided_rows_give_what_contiguous_ones_give() -> None:
    layer = NormMLP(6, 10, dtype=torch.float64)
    x = make(5, 3, 6).transpose(0, 1)
    assert not x.is_contiguous()
    torch.testing.assert_close(layer(x), layer(x.contiguous()))


def test_layers_start_where_the_real_ones_do() -> None:
    torch.manual_seed(0)
    layer = NormMLP(128, 256, bias=True, normalization="LayerNorm")
    for weight in (layer.fc1_weight, layer.fc2_weight):
        # The sample deviation of n normal values scatters by 1 / sqrt(2 n) of itself; six of those.
        assert abs(weight.std().item() / module.INIT_STD - 1) < 6 / (2 * weight.numel()) ** 0.5
    assert (layer.layer_norm_weight == 1).all()
    assert not any(part.any() for part in (layer.layer_norm_bias, layer.fc1_bias, layer.fc2_bias))
    assert NormMLP(4, 4, device="meta", dtype=torch.bfloat16).fc1_weight.is_meta


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: MLP(4, 4, activation="swish"), r"no activation is called 'swish'.*gelu, .*swiglu"),
        (lambda: activation(make(2, 4), "swiglu"), "call gated_activation"),
        (lambda: gated_activation(make(2, 4), "gelu"), "call activation"),
        (lambda: gated_activation(make(2, 5), "swiglu"), r"\(2, 5\) ends in an odd width"),
        (lambda: MLP(0, 4), "hidden=0: each is 1 or more"),
        (lambda: MLP(4, -1), "ffn_hidden=-1: each is 1 or more"),
        (lambda: NormMLP(4, 4, eps=-1.0), "eps is -1.0"),
        (lambda: NormMLP(4, 4, normalization="batch"), "no normalization is called 'batch'"),
    ],
)
def test_wrong_input_is_refused_with_the_next_step(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
