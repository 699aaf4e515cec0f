"""The bridge's call sites against a real Transformer Engine on a real GPU: accepted, right shape, finite.

Opt-in by where it runs: without a CUDA device and a TE install every test here is not run. Parity is not judged here.
"""

from __future__ import annotations

import pytest

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.attention import TeAttention
from megacpp_validate.bridge.expert_gemm import TeExpertBank
from megacpp_validate.bridge.graph_capture import te_capture
from megacpp_validate.bridge.layer_spec import te_attention_layer, te_layer_spec, te_mamba_in_projection, te_norm
from megacpp_validate.bridge.linear_walker import TeLinear
from megacpp_validate.bridge.native_block import TeBlock
from megacpp_validate.bridge.permute import (
    TePadding,
    te_permute,
    te_sort_chunks,
    te_sort_chunks_with_probs,
    te_unpermute,
)
from megacpp_validate.bridge.te_fp8 import (
    reset_te_state,
    te_block_scaling,
    te_current_scaling,
    te_delayed_scaling,
    te_mxfp8,
    te_nvfp4,
    te_quantized_weights,
    te_recompute,
    te_scope,
    te_state,
    te_support,
)
from megacpp_validate.bridge.vendor import Entry

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
pytestmark = pytest.mark.filterwarnings("default")
HIDDEN, HEADS, GROUPS, WIDTH, EXPERTS = 256, 4, 2, 64, 4


@pytest.fixture(autouse=True, scope="module")
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("not-run: there is no CUDA device")
    if not te.is_te_available():
        pytest.skip(f"not-run: {te.why_te_is_unavailable()}")
    torch.manual_seed(0)


def rows(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def test_every_accessor_gives_something() -> None:
    entries = [value for value in vars(te).values() if isinstance(value, Entry)]
    assert len(entries) > 25
    assert {entry.name: entry.why_missing() for entry in entries if entry() is None} == {}


def test_linear() -> None:
    native = torch.nn.Linear(HIDDEN, 2 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    layer = TeLinear(native, name="mlp.up")
    assert layer(rows(8, HIDDEN)).shape == (8, 2 * HIDDEN)
    assert layer.inner.weight.shape == native.weight.shape
    assert layer.inner.bias.shape == native.bias.shape


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_attention(mask: str) -> None:
    attention = TeAttention(num_heads=HEADS, head_dim=WIDTH, num_gqa_groups=GROUPS)
    out = attention(rows(2, HEADS, 128, WIDTH), rows(2, GROUPS, 128, WIDTH), rows(2, GROUPS, 128, WIDTH), mask=mask)
    assert out.shape == (2, HEADS, 128, WIDTH)
    assert out.isfinite().all()


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_block(activation: str) -> None:
    block = TeBlock(
        hidden=HIDDEN, ffn_hidden=4 * HIDDEN, num_heads=HEADS, head_dim=WIDTH, num_gqa_groups=GROUPS,
        activation=activation, eps=1e-5, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    given = rows(2, 128, HIDDEN, grad=True)
    block(given).sum().backward()
    assert given.grad.isfinite().all()
    assert all(parameter is not None for parameter in block.parameters())


def test_layer_spec() -> None:
    spec = te_layer_spec()
    assert {kind for kind, layer in spec.items() if layer is None} == {"R", "head"}
    assert te_norm(HIDDEN, eps=1e-5, dtype=torch.bfloat16, device="cuda")(rows(8, HIDDEN)).shape == (8, HIDDEN)
    projection = te_mamba_in_projection(HIDDEN, 3 * HIDDEN, eps=1e-5, dtype=torch.bfloat16, device="cuda")
    assert projection(rows(8, HIDDEN)).shape == (8, 3 * HIDDEN)
    layer = te_attention_layer(
        hidden=HIDDEN, ffn_hidden=4 * HIDDEN, num_heads=HEADS, num_gqa_groups=GROUPS, layer_number=1,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    assert layer(rows(2, 128, HIDDEN)).shape == (2, 128, HIDDEN)


def test_expert_bank() -> None:
    bank = TeExpertBank(
        num_experts=EXPERTS, in_features=HIDDEN, out_features=HIDDEN, dtype=torch.bfloat16, device="cuda"
    )
    assert bank(rows(64, HIDDEN), [16, 0, 32, 16]).shape == (64, HIDDEN)
    assert bank.weight_of(3).shape == (HIDDEN, HIDDEN)


def test_permute_and_back() -> None:
    tokens, probs = rows(32, HIDDEN), torch.rand(32, EXPERTS, device="cuda")
    routing = probs > 0.5
    picked, picked_probs, row_map = te_permute(tokens, probs, routing, num_out_tokens=int(routing.sum()))
    assert picked.shape == (int(routing.sum()), HIDDEN)
    assert picked_probs.shape == (int(routing.sum()),)
    weights = torch.where(routing, probs, 0.0)
    assert te_unpermute(picked, row_map, probs=weights, shape=tokens.shape).shape == tokens.shape


def test_sort_chunks_and_padding() -> None:
    sizes = torch.tensor([16, 8, 24, 16], device="cuda", dtype=torch.int32)
    order = torch.tensor([2, 0, 3, 1], device="cuda", dtype=torch.int32)
    given, probs = rows(64, HIDDEN), torch.rand(64, device="cuda")
    assert te_sort_chunks(given, sizes, order).shape == given.shape
    moved, moved_probs = te_sort_chunks_with_probs(given, probs, sizes, order)
    assert (moved.shape, moved_probs.shape) == (given.shape, probs.shape)
    padding = TePadding(EXPERTS, align=16)
    padded, counts = padding.pad(given, [15, 1, 32, 16])
    assert list(counts) == [16, 16, 32, 16]
    assert padding.unpad(padded, [15, 1, 32, 16]).shape == given.shape


@pytest.mark.parametrize("recipe", [te_delayed_scaling, te_current_scaling, te_block_scaling])
def test_scope_recompute_and_state(recipe: object) -> None:
    reset_te_state()
    layer = TeLinear(torch.nn.Linear(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16), name="x")
    given = rows(128, HIDDEN, grad=True)
    asked = recipe()
    with te_scope(enabled=True, recipe=asked, amax_reduction_group=None):
        assert te_state()["recipe"] is asked
        te_recompute(layer.inner, given, use_reentrant=False).sum().backward()
    assert given.grad.isfinite().all()
    assert te_state()["enabled"] is False


def test_recipes_that_this_device_may_lack_can_be_made() -> None:
    assert type(te_mxfp8()).__name__ == "MXFP8BlockScaling"
    assert type(te_nvfp4()).__name__ == "NVFP4BlockScaling"
    assert set(te_support()) == {"fp8", "mxfp8", "fp8_block_scaling", "nvfp4"}


def test_quantized_weights_and_graphs() -> None:
    asked = te_delayed_scaling()
    with te_quantized_weights(enabled=True, recipe=asked):
        native = torch.nn.Linear(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
        assert type(TeLinear(native, name="x").inner.weight).__name__ == "Float8Tensor"
    layer = TeLinear(torch.nn.Linear(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16), name="y").inner
    given = rows(128, HIDDEN, grad=True)
    graphed = te_capture(
        (layer,), ((given,),), enabled=True, recipe=asked, amax_reduction_group=None, warmup=3, cache_weights=False
    )[0]
    with te_scope(enabled=True, recipe=asked, amax_reduction_group=None):
        assert graphed(given).isfinite().all()
