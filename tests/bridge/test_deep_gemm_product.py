"""What DeepGEMM's kernels are handed, held to kernels in torch that assert as the real ones do; and both gradients."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import deep_gemm, expert_gemm  # noqa: E402
from megacpp_validate.bridge.expert_gemm import ExpertGemm  # noqa: E402
from megacpp_validate.native.grouped_gemm import grouped_gemm_loop  # noqa: E402
from megacpp_validate.probes.expert_gemm import Bank  # noqa: E402
from tests.deep_gemm_double import grouped, install, plain  # noqa: E402


@pytest.fixture(autouse=True)
def however_few_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(expert_gemm.SWITCH, "always")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def sample(counts: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    rows = torch.randn(sum(counts), 256).bfloat16().requires_grad_()
    weights = (torch.randn(len(counts), 128, 256) / 16).bfloat16().requires_grad_()
    return rows, weights, torch.randn(sum(counts), 128).bfloat16()


def weights_of(found: Any) -> Any:
    """[E, N, K]: the gradient of every expert's weight."""
    return torch.stack([tensor for name, tensor in found.items() if name.startswith("grad.weight")])


@pytest.mark.usefixtures("kernel")
def test_many_experts_with_unequal_rows_get_the_gradient_of_the_weights_in_bf16_and_it_is_said() -> None:
    counts = (129, *[1] * 17)
    rows, weights, gradient = sample(counts)
    layer = bank(num_experts=len(counts))
    layer.load_native_state_dict({"weight": weights})
    (seen,) = torch.autograd.grad(layer(rows, counts), layer.bank.weight, gradient)
    assert [refusal.code for refusal in layer.choice.refusals] == ["weight-gradient-bf16"]
    wanted = Bank(rows, weights, counts, gradient).exact()
    torch.testing.assert_close(seen.double(), weights_of(wanted), rtol=2**-7, atol=1e-5)
    assert deep_gemm.choose_weight_gradient((5,) * 64) == "fp8", "as many tiles for each: one launch"
    assert deep_gemm.choose_weight_gradient((129, 1, 0)) == "fp8"


def bank(**more: object) -> ExpertGemm:
    sizes = {"num_experts": 3, "in_features": 256, "out_features": 128, "dtype": torch.bfloat16, "device": "cpu"}
    return ExpertGemm(**{**sizes, "backends": ("deep_gemm", "native"), **more})


@pytest.mark.usefixtures("kernel")
def test_the_bank_takes_it_where_it_is_named() -> None:
    rows, weights, _ = sample((3, 0, 4))
    layer = bank()
    layer.load_native_state_dict({"weight": weights})
    out = layer(rows, (3, 0, 4))
    assert layer.choice.observed == "deep_gemm"
    assert layer.choice.refusals == ()
    plain = grouped_gemm_loop(rows, weights, (3, 0, 4))
    error = float((out - plain).detach().norm() / plain.detach().norm())
    assert 0.02 < error < 0.06, "FP8, and no less"
    assert type(out.grad_fn).__name__.startswith("_GroupedFp8")
    layer(rows[:0], (0, 0, 0))
    assert layer.choice.observed == "native"
    assert [refusal.code for refusal in layer.choice.refusals] == ["no-rows"]


# Names of the two kernels: until 2026-01-16; with aliases (sgl-deep-gemm 0.1.3, DeepGEMM 2.5.0 to 2.8.0); without any.
OLD = ("m_grouped_fp8_gemm_nt_contiguous", "fp8_gemm_nt")
NEW = ("m_grouped_fp8_fp4_gemm_nt_contiguous", "fp8_fp4_gemm_nt")


@pytest.mark.parametrize("names", [(OLD,), (NEW, OLD), (NEW,), ()])
def test_kernels_are_taken_by_their_names_of_today_and_a_library_without_them_is_refused_with_the_reason(
    names: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    library: Any = types.ModuleType("deep_gemm")
    library.get_mk_alignment_for_contiguous_layout = lambda: 128
    for pair in names:
        kernels = (grouped, plain) if pair is names[0] else (None, None)  # an alias is not asked for
        vars(library).update(zip(pair, kernels, strict=True))
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setattr(deep_gemm.DEEP_GEMM, "_verdict", None)
    for entry in (deep_gemm.grouped_fp8_gemm, deep_gemm.fp8_gemm):
        monkeypatch.setattr(entry, "_found", None)
    rows, weights, gradient = sample((3, 0, 4))
    layer = bank()
    layer.load_native_state_dict({"weight": weights})
    layer(rows, (3, 0, 4)).backward(gradient)
    assert layer.choice.observed == ("deep_gemm" if names else "native")
    assert [refusal.code for refusal in layer.choice.refusals] == ([] if names else ["deep-gemm-unavailable"])
    assert names or "`grouped_fp8_gemm` cannot" in layer.choice.refusals[0].reason


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


@pytest.mark.usefixtures("kernel")
def test_weights_are_rounded_in_the_first_microbatch_and_kept_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weights, _ = sample((3, 4, 4))
    layer, made, whole = bank(), [], expert_gemm.cast_weight
    layer.load_native_state_dict({"weight": weights})
    monkeypatch.setattr(expert_gemm, "cast_weight", lambda *a, **k: made.append(1) or whole(*a, **k))
    before = layer(rows, (3, 4, 4), is_first_microbatch=False)
    layer.bank.weight.data.mul_(-2)
    kept, first, fresh = (layer(rows, (3, 4, 4), is_first_microbatch=which) for which in (False, True, None))
    assert len(made) == 2
    assert torch.equal(kept, before), "a change through .data is not counted"
    assert torch.equal(first, fresh)
    assert not torch.equal(first, before)
    with torch.no_grad():
        layer.bank.weight.mul_(-0.5)
    assert torch.equal(layer(rows, (3, 4, 4), is_first_microbatch=False), before)


def test_weights_are_rounded_anew_after_a_step_of_a_fused_optimizer_which_counts_no_version() -> None:
    layer = bank(backends=("native",))
    layer.load_native_state_dict({"weight": sample((1, 2, 3))[1]})
    before, weight = layer.quantized_weight(), layer.bank.weight
    assert layer.quantized_weight() is before
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()
    assert torch.equal(layer.quantized_weight().values.float(), deep_gemm.cast_weight(weight).values.float())


def test_nothing_is_kept_in_inference_mode_or_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        layer = bank(backends=("native",))
        assert layer.quantized_weight() is not layer.quantized_weight()
    on_cuda = types.SimpleNamespace(is_cuda=True, is_inference=lambda: False, data_ptr=lambda: 0, _version=0)
    del layer.bank.weight
    layer.bank.weight = on_cuda
    monkeypatch.setattr(expert_gemm, "cast_weight", lambda _: object())
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert (layer.quantized_weight() is layer.quantized_weight()) is not capturing


def test_triton_casts_have_the_smallest_scale_of_those_in_torch() -> None:
    kernels = Path(deep_gemm.__file__).with_name("kernels") / "block_casts.py"
    (found,) = re.findall(r"^SMALLEST_AMAX = tl\.constexpr\((.+)\)$", kernels.read_text(), re.MULTILINE)
    assert float(found) == deep_gemm.SMALLEST_AMAX


def test_gradients_of_a_mean_over_many_tokens_are_rounded_as_large_ones_are() -> None:
    rows, _, _ = sample((130, 5))
    tiles = deep_gemm.plan_tiles((130, 5), "cpu")
    casts: Any = [deep_gemm.cast_tokens(one, tiles)[0] for one in (rows, rows * 2.0**-40)]
    assert torch.equal(*(one.values.float() for one in casts))


def test_tiles_hold_rows_of_one_expert_each() -> None:
    tiles = deep_gemm.plan_tiles((130, 0, 5, 128), "cpu")
    first, real, expert, start, padded = tiles.table.tolist()
    assert first == [0, 128, 130, 135]
    assert real == [128, 2, 5, 128]
    assert expert == [0, 0, 2, 3]
    assert start == [0, 0, 256, 384]
    assert padded == [256, 256, 128, 128]
    assert tiles.padded == (256, 0, 128, 128)
    assert tiles.starts == [0, 256, 256, 384, 512]
    assert (tiles.rows, tiles.number) == (512, 4)
