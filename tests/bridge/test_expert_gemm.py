"""The expert bank on its native path and on the double of TE, and where the dispatcher stays in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megacpp_validate.bridge import errors, expert_gemm, fp8_scope
from megacpp_validate.bridge.backends import NoBackend
from megacpp_validate.bridge.expert_gemm import SOURCE, SWITCH, ExpertGemm, why_bf16_is_faster
from megacpp_validate.native.grouped_gemm import grouped_gemm_loop

EXPERTS, INPUTS, OUTPUTS = 4, 32, 48


def bank(dtype: torch.dtype = torch.float32, **more: object) -> ExpertGemm:
    sizes = {"num_experts": EXPERTS, "in_features": INPUTS, "out_features": OUTPUTS}
    return ExpertGemm(**{**sizes, "dtype": dtype, "device": "cpu", **more})


def loaded(dtype: torch.dtype = torch.float32, **more: object) -> tuple[ExpertGemm, torch.Tensor]:
    torch.manual_seed(0)
    layer = bank(dtype, **more)
    weight = torch.randn(EXPERTS, layer.out_features, layer.in_features).to(dtype) / INPUTS**0.5
    layer.load_native_state_dict({"weight": weight})
    return layer, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_there_and_back_to_the_bit_and_all_are_trained(backend: str, dtype: torch.dtype) -> None:
    layer, weight = loaded(dtype)
    state = layer.native_state_dict()
    assert (set(state), state["weight"].dtype) == ({"weight"}, dtype)
    assert torch.equal(state["weight"], weight)
    assert sum(one.numel() for one in layer.parameters() if one.requires_grad) == weight.numel()


def loading(**state: torch.Tensor) -> Callable[[], object]:
    return lambda: bank().load_native_state_dict(state)


def calling(
    shape: tuple[int, ...], counts: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Callable[[], object]:
    return lambda: bank()(torch.zeros(shape, dtype=dtype), counts)


COUNTS = (5, 0, 7, 3)
REFUSED: list[tuple[type[Exception], Callable[[], object]]] = [
    (errors.WeightMismatch, loading()),
    (errors.WeightMismatch, loading(weight=torch.zeros(EXPERTS, INPUTS, OUTPUTS))),
    (errors.WeightMismatch, loading(weight0=torch.zeros(OUTPUTS, INPUTS))),
    (errors.WeightMismatch, loading(weight=torch.zeros(EXPERTS, OUTPUTS, INPUTS), bias=torch.zeros(1))),
    (errors.WrongShape, calling((2, 15, INPUTS), COUNTS)),
    (errors.WrongShape, calling((15, OUTPUTS), COUNTS)),
    (errors.TokenCountMismatch, calling((15, INPUTS), (5, 0, 7, 2))),
    (errors.TokenCountMismatch, calling((15, INPUTS), (5, 0, 7, 3, 0))),
    (errors.TokenCountMismatch, calling((15, INPUTS), ())),
    (errors.TokenCountMismatch, calling((15, INPUTS), (5, -1, 8, 3))),
    (errors.WrongDtype, calling((15, INPUTS), COUNTS, torch.bfloat16)),
    (errors.UnknownName, lambda: bank(backends=())),
    (errors.UnknownName, lambda: bank(backends=("te", "te"))),
    (errors.UnknownName, lambda: bank(backends=("cutlass",))),
]


@pytest.mark.parametrize(("error", "call"), REFUSED)
def test_what_does_not_fit_is_refused_before_any_kernel(
    backend: str, error: type[Exception], call: Callable[[], object]
) -> None:
    with pytest.raises(error, match="Next step"):
        call()


def test_te_is_told_the_microbatch(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = loaded()
    forward, seen = layer.bank.forward, list[object]()
    monkeypatch.setattr(
        layer.bank,
        "forward",
        lambda *args, **more: (seen.append(more["is_first_microbatch"]), forward(*args, **more))[1],
    )
    for first in (True, False, None):
        layer(torch.randn(15, INPUTS), (5, 0, 7, 3), is_first_microbatch=first)
    assert seen == [True, False, None]


def test_without_te_the_reason_is_recorded() -> None:
    layer, _ = loaded()
    assert layer.choice.observed != layer.choice.requested
    assert layer.choice.refusals[0].code == "te-unavailable"
    with pytest.raises(NoBackend, match="te:"):
        bank(backends=("te",))


@pytest.mark.usefixtures("te_double")
def test_the_padding_follows_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Padding(expert_gemm.TePadding):
        def __init__(self, num_experts: int, *, align: int) -> None:
            asked.append(align)
            super().__init__(num_experts, align=align)

    monkeypatch.setattr(expert_gemm, "TePadding", Padding)
    layer, _ = loaded(torch.bfloat16)
    rows = torch.randn(15, INPUTS).bfloat16()
    for name, align in (("MXFP8BlockScaling", 32), ("NVFP4BlockScaling", 128), ("DelayedScaling", 16)):
        monkeypatch.setattr(
            expert_gemm, "te_state", lambda name=name: {"enabled": True, "recipe": type(name, (), {})()}
        )
        assert layer(rows, (5, 0, 7, 3)).shape == (15, OUTPUTS)
        assert asked[-1] == align


@pytest.mark.usefixtures("te_double")
def test_widths_that_fp8_does_not_take_go_native_inside_the_scope_only() -> None:
    layer, weight = loaded(torch.bfloat16, in_features=40, out_features=24)
    rows = torch.randn(15, 40).bfloat16()
    with fp8_scope.low_precision(target="cpu", recipe="current", amax_reduction_group=fp8_scope.SINGLE_OWNER):
        out = layer(rows, (5, 0, 7, 3))
    assert [refusal.code for refusal in layer.choice.refusals] == ["fp8-width"]
    torch.testing.assert_close(out, grouped_gemm_loop(rows, weight, (5, 0, 7, 3)))
    layer(rows, (5, 0, 7, 3))
    assert layer.choice.observed == "te"


def test_a_bank_that_was_moved_is_asked_again(backend: str) -> None:
    layer, weight = loaded()
    layer.double()
    rows = torch.randn(15, INPUTS).double()
    out = layer(rows, (5, 0, 7, 3))
    assert layer.choice.observed == "native"
    assert layer.choice.refusals[0].code == ("dtype" if backend == "te" else "te-unavailable")
    torch.testing.assert_close(out, grouped_gemm_loop(rows, weight.double(), (5, 0, 7, 3)))


@pytest.mark.usefixtures("te_double")
def test_no_rows_go_native_even_where_only_te_is_named() -> None:
    layer, _ = loaded(backends=("te",))
    out = layer(torch.empty(0, INPUTS, requires_grad=True), (0,) * EXPERTS)
    out.sum().backward()
    assert layer.choice.observed == "native"
    assert [refusal.code for refusal in layer.choice.refusals] == ["no-rows"]
    assert out.shape == (0, OUTPUTS)
    assert not any(parameter.grad.any() for parameter in layer.parameters())


ROOT = Path(__file__).parents[2]
FIGURES = (ROOT / SOURCE).with_suffix(".json")


@pytest.mark.parametrize(
    ("counts", "path", "code"),
    [
        ((1024,) * 8, "bank", None),
        ((1024, 0, 1024, 0), "bank", None),
        ((512,) * 8, "bank", "few-rows"),
        ((1,), "bank", "few-rows"),
        ((0, 0, 100, 0), "bank", "few-rows"),
        ((512,) * 8, "kept", None),
        ((256,) * 8, "kept", "few-rows"),
        ((1024,) * 64, "jagged", "few-rows"),
    ],
)
def test_few_rows_stay_in_bf16(counts: tuple[int, ...], path: str, code: str | None) -> None:
    refusal = why_bf16_is_faster(counts, path)
    assert (refusal and refusal.code) == code
    assert refusal is None or SWITCH in refusal.reason


def test_the_environment_takes_fp8_however_few_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, " Always ")
    assert why_bf16_is_faster((1,), "jagged") is None


@pytest.mark.skipif(not FIGURES.exists(), reason="not-run: there are no figures")
def test_the_rule_is_what_was_measured() -> None:
    """FP8 is taken where it wins, weights rounded in every call; where it is not, it wins nothing worth having."""
    for table in json.loads(FIGURES.read_text(encoding="utf-8"))["tables"]:
        gains = {row["path"]: row["step"]["gain"] for row in table["paths"]}
        gain = gains["DeepGEMM, weights each call"]
        if why_bf16_is_faster(table["counts"], "bank") is None:
            assert gain >= 1.0, table["what"]
        else:
            assert gain < 1.15, table["what"]
