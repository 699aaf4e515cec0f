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


def test_its_version_cannot_be_mistaken() -> None:
    import transformer_engine

    assert transformer_engine.__version__ == "0.0.0+double"


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


def test_what_the_double_does_not_do_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="tp_size"):
        te.linear.require()(16, 16, device="cpu", tp_size=2)


def test_permute_and_back() -> None:
    torch.manual_seed(0)
    tokens, probs = torch.randn(9, 4, requires_grad=True), torch.rand(9, 3, requires_grad=True)
    routing = torch.rand(9, 3) > 0.5
    routing[0] = False
    rows, row_probs, row_map = te.moe_permute_with_probs.require()(
        tokens, probs, routing, num_out_tokens=int(routing.sum())
    )
    expert, token = routing.T.nonzero(as_tuple=True)
    torch.testing.assert_close(rows, tokens[token])
    torch.testing.assert_close(row_probs, probs[token, expert])
    back = te.moe_unpermute.require()(rows, row_map, merging_probs=probs * routing, restore_shape=tokens.shape)
    torch.testing.assert_close(back, tokens * (probs * routing).sum(1, keepdim=True))
    with_zero = probs.detach().masked_fill(torch.eye(9, 3).bool(), 0.0)
    zeroed, _, _ = te.moe_permute_with_probs.require()(tokens, with_zero, routing, int(routing.sum()))
    assert zeroed.equal(rows * (with_zero[token, expert] != 0)[:, None])
    assert {*observed_backends(rows), *observed_backends(row_probs), *observed_backends(back)} == {"te"}


def test_grouped_linear_is_a_linear_layer_a_group() -> None:
    torch.manual_seed(0)
    layer = te.grouped_linear.require()(3, 16, 32, bias=False, params_dtype=torch.float32, device="cpu")
    rows = torch.randn(48, 16, requires_grad=True)
    out = layer(rows, [16, 0, 32])
    torch.testing.assert_close(out[:16], rows[:16] @ layer.weight0.T)
    torch.testing.assert_close(out[16:], rows[16:] @ layer.weight2.T)
    with pytest.raises(ValueError, match="16"), te.autocast.require()(enabled=True):
        layer(rows, [15, 1, 32])
