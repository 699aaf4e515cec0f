"""The probe of BF16 zones passes on the double; a layer in the wrong precision is named."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from megacpp_validate.bridge import fp8_scope
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.fp8_scope import Zones
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8 import zones as probe
from megacpp_validate.probes.fp8.graphs import scope_of
from tests.probes.planting import RECIPES, Patch, Plant, changing, check_caught, failed, fp8_bench, module, putting

pytestmark = pytest.mark.usefixtures("te_double")


def places(bench: Bench, recipe: str = "current") -> None:
    probe._check_places(bench, probe._Model(bench), scope_of(bench, recipe), recipe)


def groups(bench: Bench) -> None:
    probe._check_zone_in_a_group(bench, scope_of(bench, "current"))


def scopes(bench: Bench) -> None:
    probe._check_scope(bench, scope_of(bench, "current"))


def test_it_passes_in_every_recipe() -> None:
    bench = fp8_bench("zones")
    probe.probe(bench)
    assert failed(bench) == set()
    names = {check.name for check in bench.checks}
    for recipe in RECIPES:
        low = {f"zones.{recipe}.layer{place}.blocks.{place}.mlp.layers" for place in (1, 2, 3)}
        high = {f"zones.{recipe}.{place}.in-bf16" for place in ("layer0", "layer4", "lm_head", "mtp")}
        assert low | high <= names


def staying(*layers: int, heads: tuple[str, ...] = ("lm_head", "mtp")) -> Plant:
    """Zones of these places."""
    return putting(Zones, "why_bf16", lambda self, place: "stays" if place in (*layers, *heads) else "")


def quiet(patch: Patch) -> None:
    """One kind of layer is in bf16 wherever it runs."""
    kind = te.linear.require()
    real = kind.start
    patch.setattr(kind, "start", lambda self, *given: (None, real(self, *given)[1]))


def backward_in_bf16(patch: Patch) -> None:
    kind = module("linear")._Linear
    real = kind.forward

    def forward(ctx: Any, rows: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        out = real(ctx, rows, weight, bias, *rest)
        ctx.rounder = None
        ctx.save_for_backward(rows, weight, bias)
        return out

    patch.setattr(kind, "forward", staticmethod(forward))


def minds_the_scope(patch: Patch) -> None:
    real, manager = module("gemm").Gemm.backward, te.fp8_state_manager.require()
    backward = lambda ctx, gradient: real(ctx, gradient * (2 if manager.is_fp8_enabled() else 1))  # noqa: E731
    patch.setattr(module("linear")._Linear, "backward", staticmethod(backward))


FAULTS: dict[str, tuple[Any, Plant, set[str]]] = {
    "first is low": (places, staying(4), {"layer0.in-bf16"}),
    "a head is low": (places, staying(0, 4, heads=("mtp",)), {"lm_head.in-bf16"}),
    "a layer in bf16": (places, quiet, {"layer2.blocks.2.down.layers"}),
    "nothing turned on": (
        places, putting(fp8_scope, "low_precision", lambda **_: fp8_scope.high_precision("quietly")),
        {f"layer{place}.blocks.{place}.{name}.layers" for place in (1, 2, 3) for name in ("up", "down", "mlp")},
    ),
    "backward in bf16": (places, backward_in_bf16, {"layer2.blocks.2.down.layers"}),
    "a zone in a group stays low": (
        groups, changing(fp8_scope, "_te_turned_off", lambda _: nullcontext), {"zone-in-a-group"},
    ),
    "a backward pass that minds the scope": (scopes, minds_the_scope, {"backward-inside"}),
}  # fmt: skip


@pytest.mark.parametrize(("judge", "plant", "wanted"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(judge: Any, plant: Plant, wanted: set[str]) -> None:
    check_caught(fp8_bench("zones"), judge, plant, wanted)
