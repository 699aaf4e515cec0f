"""The double of Transformer Engine: every accessor finds its entry, call sites are taken, FP8 rounds, and it shows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.bridge.attention import TeAttention  # noqa: E402
from megacpp_validate.probes.observe import observed_backends  # noqa: E402
from megacpp_validate.selftest.double import DoubleTooLate, entries, use_te_double  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


def test_every_accessor_finds_its_entry_point() -> None:
    assert {name: entry.why_missing() for name, entry in entries().items() if entry() is None} == {}


def test_its_version_cannot_be_mistaken() -> None:
    import transformer_engine

    assert transformer_engine.__version__ == "0.0.0+double"


def test_it_must_come_first() -> None:
    with pytest.raises(DoubleTooLate, match="Next step"):
        use_te_double()


def test_attention_is_seen_to_be_te() -> None:
    attention = TeAttention(num_heads=4, head_dim=8, num_gqa_groups=2)
    query, key = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(2, 2, 5, 8)
    out = attention(query, key, key)
    assert "te" in observed_backends(out)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, wanted)


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


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_uses_the_scales_of_the_first_time(reentrant: bool) -> None:
    torch.manual_seed(0)
    recipe = te.delayed_scaling.require()()
    grads = []
    for recomputed in (False, True):
        torch.manual_seed(1)
        layer, rows = linear(), torch.randn(16, 32, requires_grad=True)
        for factor in (1.0, 30.0):
            with te.autocast.require()(enabled=True, recipe=recipe):
                given = rows * factor
                out = te.checkpoint.require()(layer, given, use_reentrant=reentrant) if recomputed else layer(given)
            out.square().sum().backward()
        history = layer.fp8_meta["scaling_fwd"].amax_history
        # The second pass ends a scope of its own, as Transformer Engine's: the history moves on with nothing new in it.
        grads.append((rows.grad, layer.weight.grad, history[history != 0], layer.fp8_meta["scaling_fwd"].scale.clone()))
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(plain, again, rtol=0, atol=0)


def test_recipes_beyond_hopper_can_be_made_and_are_refused() -> None:
    with (
        pytest.raises(AssertionError, match="compute capability"),
        te.autocast.require()(recipe=te.mxfp8_block_scaling.require()()),
    ):
        pass
    te.fp8_state_manager.require().reset()
    assert te.fp8_state_manager.require().is_fp8_enabled() is False


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


def test_chunks_and_padding() -> None:
    rows, probs = torch.arange(12.0).view(6, 2), torch.arange(6.0)
    sizes, order = torch.tensor([1, 0, 3, 2]), torch.tensor([2, 3, 0, 1])
    moved, moved_probs = te.moe_sort_chunks_by_index_with_probs.require()(rows, probs, sizes, order)
    assert moved_probs.tolist() == [1, 2, 3, 4, 5, 0]
    assert te.moe_sort_chunks_by_index.require()(rows, sizes, order).equal(moved)
    padded, counts = te.fp8_padding.require()(3, align_size=4)(rows, [1, 0, 5])
    assert counts == [4, 0, 8]
    assert te.fp8_unpadding.require()(3, align_size=4)(padded, [1, 0, 5]).equal(rows)


def test_grouped_linear_is_a_linear_layer_a_group() -> None:
    torch.manual_seed(0)
    layer = te.grouped_linear.require()(3, 16, 32, bias=False, params_dtype=torch.float32, device="cpu")
    rows = torch.randn(48, 16, requires_grad=True)
    out = layer(rows, [16, 0, 32])
    torch.testing.assert_close(out[:16], rows[:16] @ layer.weight0.T)
    torch.testing.assert_close(out[16:], rows[16:] @ layer.weight2.T)
    with pytest.raises(ValueError, match="16"), te.autocast.require()(enabled=True):
        layer(rows, [15, 1, 32])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_layer_of_attention_and_mlp(activation: str) -> None:
    layer = te.transformer_layer.require()(
        32, 64, 4, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
        activation=activation, bias=False, fuse_qkv_params=True, attn_input_format="bshd", params_dtype=torch.float32,
        device="cpu",
    )  # fmt: skip
    rows = torch.randn(2, 5, 32, requires_grad=True)
    out = layer(rows)
    out.sum().backward()
    assert out.shape == rows.shape
    assert rows.grad.isfinite().all()
    assert layer.self_attention.layernorm_qkv.weight.shape == (64, 32)
    # Causal: the first token's output does not depend on the others.
    torch.testing.assert_close(layer(rows[:, :1]), out[:, :1])


def test_local_window() -> None:
    torch.manual_seed(0)
    attention = te.dot_product_attention.require()(2, 4, qkv_format="bshd")
    query, key, value = torch.randn(3, 1, 6, 2, 4)
    out = attention(query, key, value, window_size=(2, 0))
    again = attention(query[:, 3:], key[:, 3:], value[:, 3:], window_size=(2, 0))
    torch.testing.assert_close(out[:, 5], again[:, 2])


def test_extra_state_holds_the_scales_of_delayed_scaling() -> None:
    layer, fresh = linear(), linear()
    assert layer.state_dict()["_extra_state"].numel() == 0
    with te.autocast.require()(enabled=True, recipe=te.delayed_scaling.require()(amax_history_len=4)):
        layer(torch.full((16, 32), 3.0))
    fresh.load_state_dict(layer.state_dict())
    assert fresh.fp8_meta["scaling_fwd"].scale.equal(layer.fp8_meta["scaling_fwd"].scale)
    assert fresh.fp8_meta["recipe"] == layer.fp8_meta["recipe"]


@pytest.mark.parametrize("recipe", [None, "current", "block"])
def test_the_bridges_own_scope_takes_it(recipe: str | None) -> None:
    from megacpp_validate.bridge.fp8_scope import low_precision

    layer, rows = linear(), torch.randn(16, 32)
    plain = layer(rows)
    with low_precision(target="cpu", amax_reduction_group=None, recipe=recipe) as scope:
        assert scope.choice.observed == "te"
        assert not layer(rows).equal(plain)
