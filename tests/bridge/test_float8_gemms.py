"""A product that did not run in the precision of its recipe is named with its layers; nothing else is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.float8_gemms import Gemm, SeenGemms, find_missing, see_gemms  # noqa: E402

ROWS = 48
LAYERS = {"up": (64, 96), "down": (96, 64)}
EVERY = ("forward", "dgrad", "wgrad")
NARROW = (
    Gemm((48, 96, 64), True), Gemm((48, 64, 96), True),
    Gemm((48, 64, 96), True, True), Gemm((48, 96, 64), True, True),
    Gemm((96, 64, 48), True, True), Gemm((64, 96, 48), True, True),
)  # fmt: skip


def missing(gemms: tuple[Gemm, ...], in_fp8: tuple[str, ...] = EVERY, **options: tuple[str, ...]) -> list[str]:
    return [one.say() for one in find_missing(LAYERS, ROWS, in_fp8, SeenGemms(gemms, 1), **options)]


def test_all_of_them() -> None:
    assert missing(NARROW) == []


def test_a_transposed_product_is_the_same() -> None:
    turned = tuple(Gemm((one.sizes[1], one.sizes[0], one.sizes[2]), one.in_fp8, one.backward) for one in NARROW)
    assert missing(turned) == []


@pytest.mark.parametrize("lost", range(len(NARROW)))
def test_one_that_did_not_run(lost: int) -> None:
    assert len(missing(NARROW[:lost] + NARROW[lost + 1 :])) == 1


@pytest.mark.parametrize("lost", range(len(NARROW)))
def test_one_that_ran_in_bf16(lost: int) -> None:
    one = NARROW[lost]
    fallen = Gemm(one.sizes, False, one.backward)
    said = missing((*NARROW[:lost], fallen, *NARROW[lost + 1 :]))
    assert len(said) == 1
    assert "wanted in FP8" in said[0]


def test_a_forward_does_not_stand_in_for_a_dgrad_of_its_size() -> None:
    gemms = (*NARROW[:3], Gemm((48, 96, 64), True), *NARROW[4:])
    assert missing(gemms) == ["dgrad of `down` [96, 48, 64]: 1 wanted in FP8, 0 ran"]


def test_a_layer_whose_input_wants_no_gradient_has_no_dgrad() -> None:
    gemms = NARROW[:2] + NARROW[3:]
    assert missing(gemms, without_dgrad=("up",)) == []
    assert missing(gemms) == ["dgrad of `up` [64, 48, 96]: 1 wanted in FP8, 0 ran"]


def test_a_product_that_is_to_stay_in_bf16_and_did_not() -> None:
    said = missing(NARROW, ("forward", "dgrad"))
    assert said == ["wgrad of `up`, `down` [96, 64, 48]: 2 wanted in bf16, 0 ran"]


def test_products_of_plain_code_are_seen_once_with_their_direction() -> None:
    rows = torch.randn(8, 16, requires_grad=True)
    weight, bias = torch.randn(32, 16, requires_grad=True), torch.randn(32)
    seen = see_gemms(lambda: torch.nn.functional.linear(rows, weight, bias).sum().backward())
    found = sorted((gemm.backward, gemm.sizes, gemm.in_fp8) for gemm in seen.gemms)
    assert [one[0] for one in found] == [False, True, True]
    assert found[0] == (False, (8, 32, 16), False)
    assert seen.compiled_regions == 0


def test_a_product_in_fp8_is_seen_once_though_a_cpu_makes_it_of_others() -> None:
    left = torch.randn(16, 32).to(torch.float8_e4m3fn)
    right = torch.randn(48, 32).to(torch.float8_e4m3fn).t()
    one = torch.ones(())
    seen = see_gemms(lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
    assert [(gemm.sizes, gemm.in_fp8) for gemm in seen.gemms] == [((16, 48, 32), True)]
