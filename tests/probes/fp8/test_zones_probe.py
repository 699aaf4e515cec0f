"""The probe of zones: what is right passes; a zone off by one, a head in the scope and a quiet bf16 are told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.fp8_scope import Zones
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8 import zones as probe
from megacpp_validate.probes.fp8.quantizers import Operand
from megacpp_validate.probes.fp8.stacks import scope_of
from tests.probes.fp8.planting import failed, new_bench

pytestmark = pytest.mark.usefixtures("te_double")
Patch = pytest.MonkeyPatch
RECIPES = ("delayed", "current", "block")


def places(recipe: str = "current") -> Bench:
    bench = new_bench("zones", recipes=(recipe,))
    probe._check_places(bench, probe._Model(bench), scope_of(bench, recipe), recipe)
    return bench


def groups() -> Bench:
    bench = new_bench("zones", recipes=("current",))
    probe._check_groups(bench, scope_of(bench, "current"))
    return bench


def scopes(recipe: str = "current") -> Bench:
    bench = new_bench("zones", recipes=(recipe,))
    probe._check_scope(bench, scope_of(bench, recipe))
    return bench


def test_it_passes_in_every_recipe() -> None:
    bench = new_bench("zones")
    probe.probe(bench)
    assert failed(bench) == set()
    names = {check.name for check in bench.checks}
    for recipe in RECIPES:
        low = {f"zones.{recipe}.layer{place}.operands" for place in range(probe.LAYERS)}
        high = {f"zones.{recipe}.{place}.in-bf16" for place in ("layer0", "layer4", "lm_head", "mtp")}
        assert low | high | {f"zones.{recipe}.layer2.blocks.2.mlp.layers"} <= names
    kinds = {(row.path, row.tensor, row.format) for row in bench.quantizers}
    assert ("zones.delayed.layer2", "weight", "float8_e4m3") in kinds
    assert not any(path.endswith(("layer0", "lm_head")) for path, _, _ in kinds)


ZONE_OFF_BY_ONE: dict[str, tuple[Callable[[Zones, int], bool], set[str]]] = {
    "first-is-low": (lambda z, place: place == z.num_layers - 1, {"layer0.operands", "layer0.in-bf16"}),
    "last-is-low": (lambda z, place: place == 0, {"layer4.operands", "layer4.in-bf16"}),
    "second-is-bf16": (lambda z, place: place in (0, 1, z.num_layers - 1), {"layer1.operands"}),
    "one-before-last-is-bf16": (lambda z, place: place in (0, 3, 4), {"layer3.operands", "layer3.blocks.3.mlp.layers"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", ZONE_OFF_BY_ONE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_zone_off_by_one_is_told_by_its_layer(monkeypatch: Patch, recipe: str, fault: str) -> None:
    stays, wanted = ZONE_OFF_BY_ONE[fault]
    real = Zones.why_bf16

    def why(self: Zones, place: Any) -> str:
        if isinstance(place, str):
            return real(self, place)  # type: ignore[arg-type]
        return "stays" if stays(self, place) else ""

    monkeypatch.setattr(Zones, "why_bf16", why)
    found = failed(places(recipe))
    assert wanted <= found
    layer = next(iter(wanted)).split(".")[0]
    assert {name.split(".")[0] for name in found} == {layer}


@pytest.mark.parametrize("head", ["lm_head", "mtp"])
def test_a_head_inside_the_scope_is_told(monkeypatch: Patch, head: str) -> None:
    real = Zones.why_bf16
    monkeypatch.setattr(Zones, "why_bf16", lambda self, place: "" if place == head else real(self, place))
    assert failed(places()) == {f"{head}.operands", f"{head}.in-bf16"}


def test_a_model_inside_somebody_s_scope_is_told(monkeypatch: Patch) -> None:
    """Planted: one scope around all of it, and zones that do not turn it off."""
    bench = new_bench("zones", recipes=("current",))
    monkeypatch.setattr(fp8_scope, "group_scope", lambda *_: nullcontext())
    model, enter = probe._Model(bench), scope_of(bench, "current")
    plain = model.run

    def run(*given: Any) -> Any:
        with enter():
            return plain(*given)

    monkeypatch.setattr(model, "run", run)
    probe._check_places(bench, model, enter, "current")
    wanted = {f"{place}.{what}" for place in ("layer0", "layer4", "lm_head", "mtp") for what in ("operands", "in-bf16")}
    assert failed(bench) == wanted


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_middle_that_is_quietly_bf16_is_told(monkeypatch: Patch, recipe: str) -> None:
    """Planted in one layer of one block: its neighbours are in FP8."""
    bench = new_bench("zones", recipes=(recipe,))
    model = probe._Model(bench)
    layer = model.blocks[2].down
    real = type(layer).start
    monkeypatch.setattr(
        type(layer), "start", lambda self, *given: (None, False) if self is layer else real(self, *given)
    )
    probe._check_places(bench, model, scope_of(bench, recipe), recipe)
    assert failed(bench) == {"layer2.operands", "layer2.blocks.2.down.layers"}


def test_a_scope_that_turns_nothing_on_is_told(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fp8_scope, "low_precision", lambda **_: fp8_scope.high_precision("quietly"))
    found = failed(places())
    assert {f"layer{place}.operands" for place in (1, 2, 3)} <= found
    assert not any(name.endswith("in-bf16") for name in found)


def test_a_backward_pass_in_bf16_is_told(monkeypatch: Patch) -> None:
    from transformer_engine.pytorch.linear import _Linear

    real = _Linear.forward

    def forward(ctx: Any, rows: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        out = real(ctx, rows, weight, bias, *rest)
        ctx.rounder = None
        ctx.save_for_backward(rows, weight, bias)
        return out

    monkeypatch.setattr(_Linear, "forward", staticmethod(forward))
    bench = places()
    assert {"layer2.operands", "layer2.blocks.2.down.layers"} <= failed(bench)
    said = next(check.detail for check in bench.checks if check.name == "layer2.operands")
    assert "no FP8 product seen for dgrad, wgrad" in said


def operand(product: Any, form: str) -> Operand:
    return Operand(product, "input", "Kind", form, "")


@pytest.mark.parametrize(("seen", "is_bf16", "wanted"), [
    ([("forward", "bfloat16"), ("dgrad", "bfloat16"), ("wgrad", "bfloat16")], True, []),
    ([("forward", "bfloat16"), ("dgrad", "float8_e5m2")], True, ["input of x, dgrad: float8_e5m2"]),
    ([], True, ["x: no product was seen"]),
    ([("forward", "float8_e4m3"), ("dgrad", "float8_e5m2"), ("wgrad", "float8_e5m2")], False, []),
    ([("forward", "float8_e4m3"), ("dgrad", "bfloat16"), ("wgrad", "float8_e5m2")], False,
     ["input of x, dgrad: bfloat16", "x: no FP8 product seen for dgrad"]),
    ([], False, ["x: no FP8 product seen for forward, dgrad, wgrad"]),
])  # fmt: skip
def test_what_products_got_is_judged(seen: list[tuple[str, str]], is_bf16: bool, wanted: list[str]) -> None:
    made = {"x": [operand(*one) for one in seen]}
    assert probe.wrong_operands(made, is_bf16=is_bf16, sees_bf16=True) == wanted


# --- groups and scopes ------------------------------------------------------------------------------------


def test_groups_and_scopes_pass_alone() -> None:
    assert failed(groups()) == failed(scopes()) == set()


def test_a_group_that_enters_for_each_layer_is_told(monkeypatch: Patch) -> None:
    real = fp8_scope.group_scope

    def each(layers: Any, zones: Any, factories: Any) -> Any:
        if not zones.why_group_is_bf16(layers):
            for factory in factories[1:]:
                factory()
        return real(layers, zones, factories)

    monkeypatch.setattr(fp8_scope, "group_scope", each)
    assert failed(groups()) == {"between"}


def test_a_group_that_enters_although_one_layer_stays_is_told(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Zones, "why_group_is_bf16", lambda self, layers: self.why_bf16(layers[0]))
    assert failed(groups()) == {"with-the-last", "with-a-head"}


def test_a_second_entry_that_is_let_in_is_told(monkeypatch: Patch) -> None:
    real = fp8_scope.PrecisionScope.__enter__

    def enter(self: Any) -> Any:
        if self.plan.exclusive and fp8_scope.open_here():
            return fp8_scope.open_here()[-1].scope
        return real(self)

    monkeypatch.setattr(fp8_scope.PrecisionScope, "__enter__", enter)
    assert failed(groups()) == {"layer-enters-again", "group-in-a-group"}


def test_a_zone_in_a_group_that_stays_low_is_told(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fp8_scope, "_te_turned_off", fp8_scope._unchanged)
    assert failed(groups()) == {"zone-in-a-group"}


def test_a_scope_that_stays_on_after_an_exception_is_told(monkeypatch: Patch) -> None:
    manager = te.fp8_state_manager.require()
    real = manager.restore.__func__

    def restore(cls: Any, kept: Any) -> None:
        import sys

        if sys.exc_info()[0] is None:
            real(cls, kept)

    monkeypatch.setattr(manager, "restore", classmethod(restore))
    try:
        assert "after-an-exception" in failed(scopes())
    finally:
        manager.reset()


def test_a_backward_pass_that_minds_the_scope_is_told(monkeypatch: Patch) -> None:
    from transformer_engine.pytorch.gemm import Gemm
    from transformer_engine.pytorch.linear import _Linear

    manager = te.fp8_state_manager.require()
    real = Gemm.backward

    def backward(ctx: Any, gradient: Any) -> Any:
        return real(ctx, gradient * (2 if manager.is_fp8_enabled() else 1))

    monkeypatch.setattr(_Linear, "backward", staticmethod(backward))
    assert failed(scopes()) == {"backward-inside"}


def test_what_an_exception_leaves_behind_is_told(monkeypatch: Patch) -> None:
    real = probe._expecting_the_plant

    def spoils(call: Any, block: Any) -> None:
        real(call, block)
        kind = te.linear.require()
        forward = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *given, **more: forward(self, *given, **more) * 2)

    monkeypatch.setattr(probe, "_expecting_the_plant", spoils)
    assert failed(scopes()) == {"after-an-exception.next"}
    assert torch.is_grad_enabled()
