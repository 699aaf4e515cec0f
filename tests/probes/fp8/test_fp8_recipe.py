"""The probe of a recipe: what is right passes, and each fault planted in it is caught by its check."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope, recipes, te_fp8
from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import recipe as recipe_probe
from megacpp_validate.probes.fp8.quantizers import GEMM, watching_operands
from tests.probes.fp8.planting import (
    Patch,
    Plant,
    after_update,
    failed,
    module,
    never_rolls,
    new_bench,
    plant_kernel,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def run(recipe: str, plant: Plant) -> Bench:
    bench = new_bench(recipe=recipe)
    with Patch.context() as patch:
        plant(patch)
        with contextlib.suppress(Exception):  # some faults break what comes after them
            recipe_probe.probe(bench)
    return bench


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_right_passes(te_double: None, recipe: str, seed: int) -> None:
    bench = new_bench(recipe=recipe, seed=seed)
    recipe_probe.probe(bench)
    assert failed(bench) == set()
    assert not bench.unsupported
    seen = {(row.path, row.tensor): (row.kind, row.format, row.block) for row in bench.quantizers}
    kind, blocks = {
        "delayed": ("Float8Quantizer", ("tensor", "tensor")),
        "current": ("Float8CurrentScalingQuantizer", ("tensor", "tensor")),
        "block": ("Float8BlockQuantizer", ("1x128", "128x128")),
    }[recipe]
    gradients = "float8_e4m3" if recipe == "block" else "float8_e5m2"
    for layer in ("linear", "mlp", "experts"):
        path = f"fp8.{recipe}.{layer}"
        assert seen[path, "input"] == (kind, "float8_e4m3", blocks[0])
        assert seen[path, "weight"] == (kind, "float8_e4m3", blocks[1])
        assert seen[path, "gradient"] == (kind, gradients, blocks[0])


def test_nothing_to_see_without_te(te_double: None) -> None:
    with pytest.raises(CannotRun, match="Next step"):
        recipe_probe.probe(new_bench(recipe="delayed", requested="native"))


def test_a_release_that_refuses_it_is_red(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "check_fp8_support", lambda: lambda: (False, "wants CUDA 12.9"))
    monkeypatch.setattr(te.TE, "_presets", {})
    bench = new_bench(recipe="current")
    with Patch.context() as patch:
        patch.setattr(fp8_scope, "why_recipe_is_refused", lambda recipe: "wants CUDA 12.9")
        recipe_probe.probe(bench)
    assert failed(bench) == {"fp8.current.supported"}


# --- a target that lacks it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_target_that_lacks_it(te_double: None, recipe: str) -> None:
    bench = new_bench(recipe=recipe)
    recipe_probe.probe(bench)
    assert failed(bench) == set()
    assert "compute capability 10.0" in bench.unsupported
    assert "b200" in bench.unsupported
    assert not fp8_scope.te_state()["enabled"]


def quantization() -> Any:
    return sys.modules["transformer_engine.pytorch.quantization"]


def supports_it(patch: Patch) -> None:
    patch.setattr(quantization(), "check_mxfp8_support", lambda: (True, ""))


def says_nothing(patch: Patch) -> None:
    patch.setattr(quantization(), "check_mxfp8_support", lambda: (False, "no."))


def own_scope_lets_it_in(patch: Patch) -> None:
    patch.setattr(fp8_scope, "te_scope", lambda **_: contextlib.nullcontext())


def bridge_lets_it_in(patch: Patch) -> None:
    patch.setattr(fp8_scope, "recipe_for", lambda target, name=None: name)
    patch.setattr(fp8_scope, "why_recipe_is_refused", lambda recipe: "")


def bridge_names_nobody(patch: Patch) -> None:
    b200 = recipes.TARGETS["b200"]
    patch.setattr(
        fp8_scope, "recipe_for", lambda *_: (_ for _ in ()).throw(recipes.WrongTarget("no. Next step: another"))
    )
    assert "mxfp8" in b200.recipes


def stays_on(patch: Patch) -> None:
    patch.setattr(fp8_scope, "reset_te_state", lambda: None)


LACKING: dict[str, tuple[Plant, str]] = {
    "supports-it": (supports_it, "fp8.mxfp8.te-refuses"),
    "supports-it-in-its-scope": (supports_it, "fp8.mxfp8.te-scope-refuses"),
    "says-nothing": (says_nothing, "fp8.mxfp8.te-says-why"),
    "own-scope-lets-it-in": (own_scope_lets_it_in, "fp8.mxfp8.te-scope-refuses"),
    "bridge-lets-it-in": (bridge_lets_it_in, "fp8.mxfp8.bridge-refuses"),
    "bridge-names-nobody": (bridge_names_nobody, "fp8.mxfp8.bridge-names-targets"),
    "stays-on": (stays_on, "fp8.mxfp8.te-stays-off"),
}


@pytest.mark.parametrize(("plant", "caught"), LACKING.values(), ids=LACKING.keys())
def test_a_fault_of_a_target_that_lacks_it(te_double: None, plant: Plant, caught: str) -> None:
    assert caught in failed(run("mxfp8", plant))


def test_a_surprise_says_so(te_double: None) -> None:
    bench = run("mxfp8", supports_it)
    said = next(check.detail for check in bench.checks if check.name == "fp8.mxfp8.te-refuses")
    assert "surprise" in said


# --- what ran ---------------------------------------------------------------------------------------------------------


def gradients_in_e4m3(patch: Patch) -> None:
    patch.setattr(te_fp8, "te_format", lambda name: te.fp8_format.require().E4M3)


def another_recipe(patch: Patch) -> None:
    patch.setattr(fp8_scope, "te_delayed_scaling", lambda **_: te_fp8.te_current_scaling())


def with_cast(change: Callable[..., Any]) -> Plant:
    """Damage what casts an operand: change(plain, tensor, recipe, top, scale, is_weight=...)."""

    def plant(patch: Patch) -> None:
        plain = module("layer").cast_of

        def changed(*given: Any, **more: Any) -> Any:
            return change(plain, *given, **more)

        patch.setattr(module("layer"), "cast_of", changed)

    return plant


def activations_in_e5m2(plain: Any, tensor: Any, recipe: Any, top: float, scale: Any, *, is_weight: bool) -> Any:
    return plain(tensor, recipe, top if is_weight else 57344.0, scale, is_weight=is_weight)


def weights_by_rows(plain: Any, tensor: Any, recipe: Any, top: float, scale: Any, *, is_weight: bool) -> Any:
    del is_weight
    return plain(tensor, recipe, top, scale, is_weight=False)


def second_product_in_bf16(patch: Patch) -> None:
    plain = module("layernorm_mlp")._LayerNormMLP.apply
    patch.setattr(
        module("layernorm_mlp")._LayerNormMLP,
        "apply",
        lambda rows, weight, bias, rounder, gemm, last: plain(
            rows, weight, bias, None if gemm else rounder, gemm, last
        ),
    )


def one_expert_in_bf16(patch: Patch) -> None:
    plain = module("grouped_linear")._GroupedLinear.apply
    patch.setattr(
        module("grouped_linear")._GroupedLinear,
        "apply",
        lambda rows, weight, bias, rounder, *rest: plain(rows, weight, bias, None if rest[0] == 2 else rounder, *rest),
    )


def one_weight_gradient_zero(patch: Patch) -> None:
    kind = module("grouped_linear")._GroupedLinear
    plain = kind.backward

    def changed(ctx: Any, grad: Any) -> Any:
        rows, weight, *rest = plain(ctx, grad)
        return (rows, weight * 0 if ctx.gemm == 2 else weight, *rest)

    patch.setattr(kind, "backward", staticmethod(changed))


def with_scale_of(change: Callable[[Any, Any], Any]) -> Plant:
    """What a scale without history says of itself: change(amax, scale)."""
    return wrapped(
        lambda: module("quantized"), "scale_of",
        lambda plain: lambda amax, top, **more: change(amax, plain(amax, top, **more)),
    )  # fmt: skip


zero_step_empties = after_update(lambda state, history, _: None if history[0].any() else state.amax_history.zero_())


def one_scale_a_tensor(patch: Patch) -> None:
    """Blocks are claimed, and the values are those of a tensor's scale."""
    plain = module("layer").round_tensor
    patch.setattr(module("layer"), "round_blocks", lambda tensor, high, wide, top, *, power_of_2: plain(tensor, top))


def frozen_scale(patch: Patch) -> None:
    layer = module("layer")
    patch.setattr(layer, "round_tensor", lambda tensor, top, **_: layer.round_scaled(tensor, torch.ones(()), top))


def in_grouped(change: Callable[[Any], Any]) -> Plant:
    return wrapped(te.grouped_linear.require, "forward", lambda plain: lambda *given: change(plain(*given)))


def in_mlp(change: Callable[[Any], Any]) -> Plant:
    return wrapped(te.layernorm_mlp.require, "forward", lambda plain: lambda *given: change(plain(*given)))


RAN: dict[str, tuple[str, Plant, str]] = {
    "gradients-in-e4m3": ("current", gradients_in_e4m3, "fp8.current.linear.dgrad.gradient.quantizer"),
    "gradients-in-e4m3-of-wgrad": ("delayed", gradients_in_e4m3, "fp8.delayed.mlp.wgrad.gradient.quantizer"),
    "activations-in-e5m2": ("delayed", with_cast(activations_in_e5m2), "fp8.delayed.linear.forward.input.quantizer"),
    "another-recipe": ("delayed", another_recipe, "fp8.delayed.linear.forward.weight.quantizer"),
    "weights-by-rows": ("block", with_cast(weights_by_rows), "fp8.block.linear.dgrad.weight.quantizer"),
    "second-product-in-bf16": ("current", second_product_in_bf16, "fp8.current.mlp.forward.weight.quantizer"),
    "one-expert-in-bf16": ("block", one_expert_in_bf16, "fp8.block.experts.wgrad.gradient.quantizer"),
    "experts-x1.1": ("current", in_grouped(lambda out: out * 1.1), "fp8.current.experts.forward"),
    "experts-exact": ("current", one_expert_in_bf16, "fp8.current.experts.wgrad2.applied"),
    "experts-gradient-x2": (
        "block", in_grouped(lambda out: (out - out.detach()) * 2 + out.detach()), "fp8.block.experts.dgrad",
    ),
    "experts-wgrad-zero": ("current", one_weight_gradient_zero, "fp8.current.experts.wgrad2"),
    "mlp-x1.2": ("block", in_mlp(lambda out: out * 1.2), "fp8.block.mlp.forward"),
    "mlp-gradient-x2": (
        "current", in_mlp(lambda out: (out - out.detach()) * 2 + out.detach()), "fp8.current.mlp.grad.fc1_weight",
    ),
    "history-never-rolls": ("delayed", never_rolls, "fp8.delayed.state.normal.input.history"),
    "zero-step-leaves-the-history": ("delayed", plant_kernel, "fp8.delayed.zero-step"),
    "zero-step-empties-the-history": ("delayed", zero_step_empties, "fp8.delayed.zero-step"),
    "frozen-scale": ("current", frozen_scale, "fp8.current.shares.steady.input.underflowed"),
    "frozen-scale-saturates": ("current", frozen_scale, "fp8.current.shares.spiked.input.overflowed"),
    "one-scale-a-tensor": ("block", one_scale_a_tensor, "fp8.block.shares.beside.gradient.underflowed"),
    "scale-a-bit-off": (
        "current", with_scale_of(lambda _, scale: scale * (1 + 2.0**-20)), "fp8.current.scale.normal.input",
    ),
    "scale-of-zeros": (
        "current",
        with_scale_of(lambda amax, scale: torch.where(amax > 0, scale, 0.5)),
        "fp8.current.scale.zero.gradient",
    ),
    "scale-a-power-of-two": (
        "current", with_scale_of(lambda _, scale: scale.log2().floor().exp2()), "fp8.current.scale.large.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "plant", "caught"), RAN.values(), ids=RAN.keys())
def test_a_fault_of_what_ran(te_double: None, recipe: str, plant: Plant, caught: str) -> None:
    assert caught in failed(run(recipe, plant))


def test_the_state_follows_what_a_zero_step_does(te_double: None) -> None:
    """One fact, told once: the histories are then held to it, and nothing else is red."""
    assert failed(run("delayed", plant_kernel)) == {"fp8.delayed.zero-step"}


def test_products_elsewhere_are_told(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    te.linear.require()
    monkeypatch.delattr(sys.modules[GEMM], "tex")
    with pytest.raises(LookupError, match="Next step"), watching_operands():
        pass


def test_what_was_watched_is_put_back(te_double: None) -> None:
    te.linear.require()
    plain = sys.modules[GEMM].tex.generic_gemm
    with pytest.raises(ZeroDivisionError), watching_operands():
        raise ZeroDivisionError
    assert sys.modules[GEMM].tex.generic_gemm is plain
