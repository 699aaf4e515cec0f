"""The probe of one FP8 recipe passes on the double, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope, layer_watch
from megacpp_validate.probes.bench import CannotRun
from megacpp_validate.probes.fp8 import recipe as probe
from megacpp_validate.probes.fp8.quantizers import GEMM, check_operands, watching_operands
from tests.probes.planting import (
    RECIPES,
    Patch,
    Plant,
    changing,
    check_caught,
    failed,
    fp8_bench,
    module,
    putting,
)

pytestmark = pytest.mark.usefixtures("nothing_stays_open", "te_double")
KINDS = {
    "delayed": ("Float8Quantizer", "tensor", "tensor", "float8_e5m2"),
    "current": ("Float8CurrentScalingQuantizer", "tensor", "tensor", "float8_e5m2"),
    "block": ("Float8BlockQuantizer", "1x128", "128x128", "float8_e4m3"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_right_passes(recipe: str, seed: int) -> None:
    bench = fp8_bench("recipe", recipe, seed=seed)
    probe.probe(bench)
    assert failed(bench) == set()
    seen = {(row.path, row.tensor): (row.kind, row.format, row.block) for row in bench.quantizers}
    kind, of_rows, of_weights, gradients = KINDS[recipe]
    for layer in ("linear", "mlp", "experts"):
        path = f"fp8.{recipe}.{layer}"
        assert seen[path, "input"] == (kind, "float8_e4m3", of_rows)
        assert seen[path, "weight"] == (kind, "float8_e4m3", of_weights)
        assert seen[path, "gradient"] == (kind, gradients, of_rows)


def test_nothing_to_see_without_te() -> None:
    with pytest.raises(CannotRun, match="Next step"):
        probe.probe(fp8_bench("recipe", "delayed", requested="native"))


def test_a_release_that_refuses_it_is_red(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fp8_scope, "why_recipe_is_refused", lambda recipe: "wants CUDA 12.9")
    bench = fp8_bench("recipe", "current")
    probe.probe(bench)
    assert failed(bench) == {"fp8.current.supported"}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_target_that_lacks_it(recipe: str) -> None:
    bench = fp8_bench("recipe", recipe)
    probe.probe(bench)
    assert failed(bench) == set()
    assert "compute capability 10.0" in bench.unsupported
    assert "b200" in bench.unsupported


def bridge_lets_it_in(patch: Patch) -> None:
    patch.setattr(fp8_scope, "recipe_for", lambda target, name=None: name)
    patch.setattr(fp8_scope, "why_recipe_is_refused", lambda recipe: "")


def support(*answer: Any) -> Plant:
    return lambda patch: patch.setattr(module("quantization"), "check_mxfp8_support", lambda: answer)


def with_cast(change: Callable[..., Any]) -> Plant:
    """Damage what casts an operand: change(plain, tensor, recipe, top, scale, is_weight=...)."""
    return changing(partial(module, "layer"), "cast_of", lambda plain: partial(change, plain))


def activations_in_e5m2(plain: Any, tensor: Any, recipe: Any, top: float, scale: Any, *, is_weight: bool) -> Any:
    return plain(tensor, recipe, top if is_weight else 57344.0, scale, is_weight=is_weight)


def last_expert_in_bf16(plain: Any) -> Any:
    def apply(rows: Any, weight: Any, bias: Any, rounder: Any, number: int, *rest: Any) -> Any:
        return plain(rows, weight, bias, None if number == 2 else rounder, number, *rest)

    return apply


def with_scale_of(change: Callable[[Any, Any], Any]) -> Plant:
    """What a scale without history says of itself: change(amax, scale)."""
    make = lambda plain: lambda amax, top, **more: change(amax, plain(amax, top, **more))  # noqa: E731
    return changing(partial(module, "quantized"), "scale_of", make)


FAULTS: dict[str, tuple[str, Plant, str]] = {
    "supports it": ("mxfp8", support(True, ""), "te-refuses"),
    "says nothing": ("mxfp8", support(False, "no."), "te-says-why"),
    "bridge lets it in": ("mxfp8", bridge_lets_it_in, "bridge-refuses"),
    "activations in E5M2": ("delayed", with_cast(activations_in_e5m2), "linear.forward.input.quantizer"),
    "one expert in bf16": (
        "block", changing(lambda: module("grouped_linear")._GroupedLinear, "apply", last_expert_in_bf16),
        "experts.wgrad.gradient.quantizer",
    ),
    "scale of zeros": ("current", with_scale_of(lambda amax, scale: torch.where(amax > 0, scale, 0.5)),
                       "scale.zero.gradient"),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "plant", "caught"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(recipe: str, plant: Plant, caught: str) -> None:
    check_caught(fp8_bench("recipe", recipe), probe.probe, plant, {f"fp8.{recipe}.{caught}"})


# --- what is refused --------------------------------------------------------------------------------------------------


def nan_is_left_out(patch: Patch) -> None:
    plain = torch.maximum
    patch.setattr(torch, "maximum", lambda a, b, **more: plain(a, b.nan_to_num(0.0), **more))


def with_not_finite(change: Callable[..., tuple[Any, ...]]) -> Plant:
    return changing(layer_watch, "_not_finite", lambda plain: lambda *given: plain(*change(*given)))


REFUSED: dict[str, tuple[Plant, str]] = {
    "layer not named": (with_not_finite(lambda what, name, *rest: (what, "one", *rest)), "nan.gradient.says"),
    "NaN left out": (nan_is_left_out, "nan.first-input"),
    "gradients unseen": (putting(layer_watch.Fp8Guard, "_after", lambda self, *_: None), "nan.gradient"),
    "never emptied": (putting(torch.Tensor, "zero_", lambda self: self), "finite.taken"),
}  # fmt: skip


def judge_refusals(bench: Any) -> None:
    probe._check_not_finite(bench, bench.low_precision("delayed"))


@pytest.mark.parametrize(("plant", "caught"), REFUSED.values(), ids=REFUSED)
def test_a_fault_of_what_is_refused(plant: Plant, caught: str) -> None:
    check_caught(fp8_bench("recipe", "delayed"), judge_refusals, plant, {caught})


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_that_accumulates_otherwise(recipe: Any, product: str) -> None:
    bench, name = fp8_bench("recipe", recipe), "forward" if product == "fprop" else product
    layer = bench.te_layer("linear", 128, 128)
    with Patch.context() as patch:
        plain = module("gemm")._split
        patch.setattr(module("gemm"), "_split", lambda of, which: plain(of, which) is not (which == product))
        rows, gradient = (bench.randn(128, 128, dtype=torch.bfloat16) for _ in range(2))
        seen = probe._step(layer, bench.low_precision(recipe), rows, gradient)
    check_operands(bench, "linear", recipe, seen, 1)
    assert failed(bench) == {f"linear.{name}.accumulator"}


def test_products_elsewhere_are_told_and_what_was_watched_is_put_back(monkeypatch: Patch) -> None:
    extension = module("cpp_extensions.gemm").tex
    plain = extension.generic_gemm
    with pytest.raises(ZeroDivisionError), watching_operands():
        raise ZeroDivisionError
    assert extension.generic_gemm is plain
    monkeypatch.delattr(__import__("sys").modules[GEMM], "tex")
    with pytest.raises(LookupError, match="Next step"), watching_operands():
        pass
