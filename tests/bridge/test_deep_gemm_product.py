"""What DeepGEMM's kernel is handed, held to one in torch that asserts as the real one does; and both gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import deep_gemm, deep_gemm_product  # noqa: E402
from megacpp_validate.bridge.expert_gemm import ExpertGemm  # noqa: E402
from megacpp_validate.bridge.vendor import Verdict  # noqa: E402
from megacpp_validate.native.grouped_gemm import grouped_gemm_loop  # noqa: E402
from megacpp_validate.probes.references.experts import reference_experts, round_rows, round_weights  # noqa: E402

ALIGN = 128


def cast_rows(rows: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return cast(rows, 1, use_ue8m0)


def cast_blocks(weight: torch.Tensor, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return cast(weight, 128, use_ue8m0)


def cast(values: torch.Tensor, high: int, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    assert not use_ue8m0
    rows, width = values.shape
    blocks = values.float().view(rows // high, high, width // 128, 128)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    rounded = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(rows, width)
    return rounded, scales.view(rows // high, width // 128)


def multiply(a, b, out: torch.Tensor, groups: torch.Tensor) -> None:
    """As `m_grouped_fp8_gemm_nt_contiguous` on sm_90, its assertions included; skipped rows keep what was there."""
    (rows, row_scales), (weights, weight_scales) = a, b
    count, inputs = rows.shape
    experts, outputs, _ = weights.shape
    assert rows.dtype == weights.dtype == torch.float8_e4m3fn
    assert row_scales.dtype == weight_scales.dtype == torch.float32
    assert row_scales.shape == (count, inputs // 128)
    assert weight_scales.shape == (experts, outputs // 128, inputs // 128)
    assert weight_scales.is_contiguous()
    assert out.shape == (count, outputs)
    assert out.dtype == torch.bfloat16
    assert groups.shape == (count,)
    assert groups.dtype == torch.int32
    assert groups.is_contiguous()
    assert count % ALIGN == 0
    x = rows.double() * row_scales.double().repeat_interleave(128, 1)
    w = weights.double() * weight_scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    out.fill_(float("nan"))
    for block in range(0, count, ALIGN):
        here = groups[block : block + ALIGN]
        assert len(set(here.tolist()) - {-1}) == 1, "one expert a block"
        expert = int(here[0])
        real = here >= 0
        out[block : block + ALIGN][real] = (x[block : block + ALIGN][real] @ w[expert].T).to(torch.bfloat16)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM's five functions in torch, on a CPU that passes for sm_90."""
    monkeypatch.setattr(deep_gemm.DEEP_GEMM, "_verdict", Verdict(True, ""))
    for entry, function in (
        (deep_gemm.grouped_fp8_gemm, multiply),
        (deep_gemm.cast_rows, cast_rows),
        (deep_gemm.cast_blocks, cast_blocks),
        (deep_gemm.rows_alignment, lambda: ALIGN),
    ):
        monkeypatch.setattr(entry, "_found", (function, ""))
    monkeypatch.setattr(deep_gemm_product, "_architecture", lambda device: 9)


def sample(counts: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    rows = torch.randn(sum(counts), 256).bfloat16().requires_grad_()
    weights = (torch.randn(len(counts), 128, 256) / 16).bfloat16().requires_grad_()
    return rows, weights, torch.randn(sum(counts), 128).bfloat16()


@pytest.mark.parametrize("counts", [(3, 0, 130, 1), (0, 0, 5, 0), (128, 128, 0, 0), (0, 1, 2, 3)])
@pytest.mark.usefixtures("kernel")
def test_forward_is_the_product_of_the_rounded_operands_and_backward_that_of_the_plain_ones(
    counts: tuple[int, ...],
) -> None:
    rows, weights, gradient = sample(counts)
    out = deep_gemm_product.deep_gemm_grouped(rows, weights, counts)
    out.backward(gradient)
    forward = reference_experts(round_rows(rows), round_weights(weights), counts, gradient).out
    backward = reference_experts(rows, weights, counts, gradient)
    torch.testing.assert_close(out.double(), forward, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(rows.grad.double(), backward.rows, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(weights.grad.double(), torch.stack(backward.weights), rtol=2**-7, atol=1e-5)
    idle = [expert for expert, count in enumerate(counts) if not count]
    assert not weights.grad[idle].any()


@pytest.mark.usefixtures("kernel")
def test_frozen_weights_and_frozen_rows() -> None:
    rows, weights, gradient = sample((3, 0, 4))
    deep_gemm_product.deep_gemm_grouped(rows, weights.detach(), (3, 0, 4)).backward(gradient)
    assert rows.grad is not None
    rows.grad = None
    deep_gemm_product.deep_gemm_grouped(rows.detach(), weights, (3, 0, 4)).backward(gradient)
    assert rows.grad is None
    assert weights.grad.shape == weights.shape


def bank(**more: object) -> ExpertGemm:
    sizes = {"num_experts": 3, "in_features": 256, "out_features": 128, "dtype": torch.bfloat16, "device": "cpu"}
    return ExpertGemm(**{**sizes, "backends": ("deep_gemm", "native"), **more})


@pytest.mark.usefixtures("kernel")
def test_the_bank_takes_it_where_it_is_named_and_says_how_gradients_are_made() -> None:
    rows, weights, _ = sample((3, 0, 4))
    layer = bank()
    layer.load_native_state_dict({"weight": weights})
    out = layer(rows, (3, 0, 4))
    assert layer.choice.observed == "deep_gemm"
    assert [refusal.code for refusal in layer.choice.refusals] == ["backward-native"]
    assert not layer.choice.fell_back
    plain = grouped_gemm_loop(rows, weights, (3, 0, 4))
    error = float((out - plain).detach().norm() / plain.detach().norm())
    assert 0.02 < error < 0.06, "FP8, and no less"
    assert type(out.grad_fn).__name__.startswith("_GroupedFp8")
    layer(rows[:0], (0, 0, 0))
    assert layer.choice.observed == "native"
    assert [refusal.code for refusal in layer.choice.refusals] == ["no-rows"]


@pytest.mark.usefixtures("kernel")
def test_weights_are_rounded_once_a_step_where_microbatches_are_said() -> None:
    rows, weights, _ = sample((3, 0, 4))
    layer = bank()
    layer.load_native_state_dict({"weight": weights})
    first = layer(rows, (3, 0, 4), is_first_microbatch=True)
    with torch.no_grad():
        layer.bank.weight.mul_(2)
    assert torch.equal(layer(rows, (3, 0, 4), is_first_microbatch=False), first)
    assert not torch.equal(layer(rows, (3, 0, 4)), first)
    renewed = layer(rows, (3, 0, 4), is_first_microbatch=True)
    assert torch.equal(renewed, layer(rows, (3, 0, 4)))
    layer.load_native_state_dict({"weight": weights})
    assert torch.equal(layer(rows, (3, 0, 4), is_first_microbatch=False), first), "loaded weights are rounded anew"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": torch.float32}, "dtype"),
        ({"in_features": 192}, "width"),
        ({"out_features": 64}, "width"),
    ],
)
@pytest.mark.usefixtures("kernel")
def test_what_it_cannot_take_goes_native_with_the_reason(change: dict[str, object], code: str) -> None:
    layer = bank(**change)
    assert layer.choice.observed == "native"
    assert [refusal.code for refusal in layer.choice.refusals] == [code]


def test_without_a_gpu_it_refuses_by_the_device_and_asks_no_import() -> None:
    layer = bank()
    assert layer.choice.observed == "native"
    assert [refusal.code for refusal in layer.choice.refusals] == ["device"]


@pytest.mark.parametrize(("major", "code"), [(8, "arch"), (12, "arch"), (10, None)])
@pytest.mark.usefixtures("kernel")
def test_only_hopper_and_blackwell(monkeypatch: pytest.MonkeyPatch, major: int, code: str | None) -> None:
    monkeypatch.setattr(deep_gemm_product, "_architecture", lambda device: major)
    refusal = deep_gemm_product.why_not_deep_gemm("cpu", torch.bfloat16, 128, 128)
    assert (refusal.code if refusal else None) == code
