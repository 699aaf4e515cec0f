"""The double of Transformer Engine: every accessor finds its entry, call sites are taken, FP8 rounds, and it shows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.probes.observe import observed_backends  # noqa: E402
from megacpp_validate.selftest.double import entries  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


def test_every_accessor_finds_its_entry_point() -> None:
    assert {name: entry.why_missing() for name, entry in entries().items() if entry() is None} == {}


def test_an_unknown_keyword_is_a_type_error() -> None:
    for entry in (te.linear, te.layernorm_linear, te.dot_product_attention, te.grouped_linear, te.rmsnorm):
        with pytest.raises(TypeError, match="colour"):
            entry.require()(16, 16, colour="green")


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    layer = te.linear.require()(32, 48, bias=bias, params_dtype=dtype, device="cpu")
    torch.nn.init.normal_(layer.weight)
    return layer


def error(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    seen, wanted = seen.detach().double(), wanted.detach().double()
    return float((seen - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("recipe", ["delayed_scaling", "float8_current_scaling", "float8_block_scaling"])
def test_fp8_rounds_forward_and_backward(recipe: str) -> None:
    torch.manual_seed(0)
    layer, rows = linear(), torch.randn(16, 32, requires_grad=True)
    upstream = torch.randn(16, 48)
    wanted = rows.detach().double() @ layer.weight.detach().double().T + layer.bias.detach().double()
    plain = layer(rows)
    assert error(plain, wanted) < 1e-6
    made = getattr(te, recipe).require()()
    with te.autocast.require()(enabled=True, recipe=made):
        out = layer(rows)
    out.backward(upstream)
    assert 0.005 < error(out, wanted) < 0.06
    assert 0.005 < error(rows.grad, upstream @ layer.weight.detach()) < 0.15
    assert 0.005 < error(layer.weight.grad, upstream.T @ rows.detach()) < 0.15
    assert error(layer.bias.grad, upstream.sum(0)) < 1e-6
    assert "te" in observed_backends(out)


def test_delayed_scaling_learns_its_scale_from_the_step_before() -> None:
    layer, rows = linear(), torch.full((16, 32), 3.0)
    recipe = te.delayed_scaling.require()(amax_history_len=4)
    seen = []
    for factor in (1.0, 100.0, 1.0):
        with te.autocast.require()(enabled=True, recipe=recipe):
            layer(rows * factor)
            seen.append(float(layer.fp8_meta["scaling_fwd"].scale[0]))
    assert seen == pytest.approx([1.0, 448 / 3, 448 / 300])
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (4, 3)
    assert float(layer.fp8_meta["scaling_fwd"].amax_history[0].max()) == 0.0


def test_a_delayed_gradient_scale_is_updated_by_the_backward_pass() -> None:
    layer, rows = linear(), torch.randn(16, 32, requires_grad=True)
    with te.autocast.require()(enabled=True, recipe=te.delayed_scaling.require()()):
        out = layer(rows)
    assert float(layer.fp8_meta["scaling_bwd"].scale[0]) == 1.0
    out.backward(torch.full_like(out, 2.0))
    assert float(layer.fp8_meta["scaling_bwd"].scale[0]) == pytest.approx(57344 / 2)
