"""The three-part bound: every planted damage is seen in every precision, and clean results never are.

`BLIND` lists what the bounds cannot see yet; a case that is seen after all fails, so that the list stays true.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.probes.bounds import Roundings, compare
from megacpp_validate.probes.emulation import emulated_linear, operand_roundings

K = 64
Made = tuple[torch.Tensor, torch.Tensor, Roundings]  # what came out, in its dtype; the fp64 reference; the roundings


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rounded(name: str, dtype: Any) -> Callable[[tuple[int, ...], int], Made]:
    """A tensor whose only error is that of its own rounding."""

    def make(shape: tuple[int, ...], seed: int) -> Made:
        exact = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
        return exact.to(dtype), exact, Roundings(((name, 1),), K, why="rounded once")

    return make


def fp8_forward(shape: tuple[int, ...], seed: int) -> Made:
    x = torch.randn(math.prod(shape[:-1]), K, generator=seeded(seed)).bfloat16()
    w = (torch.randn(shape[-1], K, generator=seeded(seed + 1)) * K**-0.5).bfloat16()
    out = emulated_linear(x, w, "current")
    return out.reshape(shape), (x.double() @ w.double().T).reshape(shape), operand_roundings("current", "forward", K)


def fp8_gradient(shape: tuple[int, ...], seed: int) -> Made:
    g = torch.randn(math.prod(shape[:-1]), K, generator=seeded(seed)).bfloat16()
    w = (torch.randn(K, shape[-1], generator=seeded(seed + 1)) * K**-0.5).bfloat16()
    x = torch.zeros(g.shape[0], shape[-1]).bfloat16().requires_grad_()
    emulated_linear(x, w, "current").backward(g)
    return x.grad.reshape(shape), (g.double() @ w.double()).reshape(shape), operand_roundings("current", "dgrad", K)


PRECISIONS: dict[str, Callable[[tuple[int, ...], int], Made]] = {
    "fp32": rounded("fp32", torch.float32),
    "bf16": rounded("bf16", torch.bfloat16),
    "fp8": fp8_forward,
    "fp8-gradient": fp8_gradient,
}


def rows_of(out: Any) -> Any:
    return out.clone().reshape(-1, out.shape[-1])


def damaged(out: Any, index: Any, change: Callable[[Any], Any]) -> Any:
    kept = rows_of(out)
    kept[index] = change(kept[index])
    return kept.reshape(out.shape)


def median_element(out: Any) -> tuple[int, int]:
    """Place of an element of middling size: neither the easiest nor the hardest to miss."""
    flat = out.flatten().abs()
    place = int((flat - flat.median()).abs().argmin())
    return divmod(place, out.shape[-1])


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda out: out * 0,
    "x0.5": lambda out: out * 0.5,
    "x2": lambda out: out * 2,
    "x1.01": lambda out: out * 1.01,
    "sign": lambda out: -out,
    "shuffled": lambda out: out.flatten().roll(out.numel() // 3).reshape(out.shape),
    "rows-swapped": lambda out: damaged(out, [0, -1], lambda rows: rows.flip(0)),
    "one-row-zero": lambda out: damaged(out, -1, lambda row: row * 0),
    "one-row-of-another": lambda out: damaged(out, -1, lambda _: rows_of(out)[0]),
    "one-column-zero": lambda out: damaged(out, (slice(None), -1), lambda column: column * 0),
    "one-element-zero": lambda out: damaged(out, median_element(out), lambda one: one * 0),
    "one-element-negated": lambda out: damaged(out, median_element(out), lambda one: -one),
    "one-nan": lambda out: damaged(out, (0, 0), lambda one: one * math.nan),
}
# Two roundings to FP8 hide what is smaller than a twentieth of the whole.
BLIND = {
    ("fp8", "one-element-zero", False),
    ("fp8", "one-element-zero", True),
    ("fp8-gradient", "x1.01", False),
    ("fp8-gradient", "one-element-zero", False),
    ("fp8-gradient", "one-element-zero", True),
}


def cases() -> list[Any]:
    made = []
    for precision in PRECISIONS:
        for damage in DAMAGES:
            for native in (False, True):
                marks = [pytest.mark.xfail(reason="the bound is blind to it")] * ((precision, damage, native) in BLIND)
                name = f"{precision}-{damage}{'-beside-native' if native else ''}"
                made.append(pytest.param(precision, damage, native, id=name, marks=marks))
    return made


@pytest.mark.parametrize(("precision", "damage", "native"), cases())
def test_every_damage_is_seen(precision: str, damage: str, native: bool) -> None:
    """In all of three draws; a result of native PyTorch beside it is an independent draw of errors at worst."""
    for seed in range(3):
        out, exact, roundings = PRECISIONS[precision]((128, 256), seed)
        assert compare("clean", out, exact, roundings=roundings, native=out if native else None).passed
        bad = DAMAGES[damage](out.double())
        assert not compare("bad", bad, exact, roundings=roundings, native=out if native else None).passed


@pytest.mark.parametrize("shape", [(4, 8), (7, 33), (64, 64), (2, 3, 5, 16), (1, 257), (300, 2)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_clean_results_pass(precision: str, shape: tuple[int, ...]) -> None:
    for seed in range(25):
        out, exact, roundings = PRECISIONS[precision](shape, seed)
        check = compare("clean", out, exact, roundings=roundings, native=out)
        assert check.passed, [part for part in check.parts if not part.passed]


# --- what is compared -------------------------------------------------------------------------------------

ONE = Roundings((("bf16", 1),), K)


def test_a_reference_of_zeros_wants_zeros() -> None:
    zeros = torch.zeros(4, 4).double()
    assert compare("x", torch.zeros(4, 4), zeros, roundings=ONE).passed
    for wrong in (1e-30, -1.0, math.nan, math.inf):
        assert not compare("x", torch.full((4, 4), wrong), zeros, roundings=ONE).passed


def test_a_reference_of_zeros_with_a_scale_allows_what_the_scale_does() -> None:
    zeros = torch.zeros(4, 4).double()
    assert compare("x", torch.full((4, 4), 1e-4), zeros, roundings=ONE, scale=1.0).passed
    assert not compare("x", torch.full((4, 4), 1e-2), zeros, roundings=ONE, scale=1.0).passed


@pytest.mark.parametrize("where", ["observed", "reference", "native"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_fails_wherever_it_is(where: str, value: float) -> None:
    tensors = {name: torch.ones(4, 4).double() for name in ("observed", "reference", "native")}
    tensors[where][1, 1] = value
    check = compare("x", tensors["observed"], tensors["reference"], roundings=ONE, native=tensors["native"])
    assert not check.passed


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,)])
def test_clean_results_of_very_few_values_pass(shape: tuple[int, ...]) -> None:
    for seed in range(400):
        exact = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
        assert compare("clean", exact.bfloat16(), exact, roundings=ONE).passed


# --- the bound itself -------------------------------------------------------------------------------------


def test_roundings_add_as_squares_and_amplify() -> None:
    none = Roundings((), 1).bound()
    one, four = Roundings((("bf16", 1),), 1).bound() - none, Roundings((("bf16", 4),), 1).bound() - none
    assert four == pytest.approx(2 * one)
    assert Roundings((("bf16", 1),), 1, amplification=3.0).bound() == pytest.approx(3 * (one + none))
    assert Roundings((), 400).bound() == pytest.approx(20 * none)
    assert Roundings((), 4, sum_format="bf16").bound() == pytest.approx(2 * 2 * 2.0**-8)


def test_a_bound_that_lets_damage_through_fails_by_itself() -> None:
    """A tolerance wider than the output: the check that holds no matter what fails."""
    out, exact, _ = PRECISIONS["bf16"]((32, 32), 0)
    wide = Roundings((("bf16", 1),), K, amplification=200.0)
    check = compare("wide", out, exact, roundings=wide)
    assert not check.passed
    assert [part.name for part in check.parts if not part.passed] == ["bound-discriminates"]


def test_a_result_worse_than_native_fails() -> None:
    """Inside of (b), and three times as wrong as native PyTorch."""
    exact = torch.randn(64, 64, generator=seeded(0), dtype=torch.float64)
    noise = torch.randn(64, 64, generator=seeded(1), dtype=torch.float64)
    wide = Roundings((("bf16", 1),), K, amplification=8.0)
    native, seen = exact + 0.003 * noise, exact + 0.009 * noise
    assert compare("x", seen, exact, roundings=wide).passed
    check = compare("x", seen, exact, roundings=wide, native=native)
    assert [part.name for part in check.parts if not part.passed] == ["against-native"]


def test_one_element_worse_than_native_fails() -> None:
    exact = torch.randn(64, 64, generator=seeded(0), dtype=torch.float64)
    fp8 = operand_roundings("current", "forward", K)
    native = exact * (1 + 2.0**-5)
    seen = native.clone()
    seen[3, 3] += 6 * float((native - exact).abs().max())
    check = compare("x", seen, exact, roundings=fp8, native=native)
    assert "largest-against-native" in [part.name for part in check.parts if not part.passed]
