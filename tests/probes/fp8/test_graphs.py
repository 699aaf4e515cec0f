"""The probe of CUDA graphs passes on the double; a replay that does something else is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.fp8 import graphs as probe
from tests.probes.planting import RECIPES, Patch, Plant, check_caught, failed, fp8_bench, module

pytestmark = pytest.mark.usefixtures("te_double")


def test_it_passes_in_every_recipe() -> None:
    bench = fp8_bench("graphs")
    probe.probe(bench)
    assert failed(bench) == set()
    names = {check.name for check in bench.checks}
    wanted = {"forward", "grad", "eval-fp8", "eval-bf16", "replayed"}
    for kind in (*RECIPES, *(f"{recipe}.cached" for recipe in RECIPES)):
        assert {f"graphs.{kind}.{name}" for name in wanted} <= names
    assert {"graphs.delayed.history", "graphs.delayed.scale"} <= names


def replay(change: Callable[..., Any]) -> Plant:
    """Let `change(plain replay, module, kept of the first replays, rows)` stand for a replay."""

    def plant(patch: Patch) -> None:
        graph, first = module("graph"), dict[int, Any]()
        real = graph._forward

        def forward(layer: Any, plain: Any, samples: Any, *rest: Any, **options: Any) -> Any:
            again = lambda *given: real(layer, plain, samples, *rest[:3], *given, **options)  # noqa: E731
            return change(again, layer, first, *rest[3:])

        patch.setattr(graph, "_forward", forward)

    return plant


def stale_input(again: Any, layer: Any, first: dict[int, Any], rows: Any) -> Any:
    if not layer.training:
        return again(rows)
    return again(rows - rows.detach() + first.setdefault(id(layer), rows.detach().clone()))


def no_gradient(again: Any, layer: Any, _: Any, rows: Any) -> Any:
    layer.down.weight.requires_grad_(not layer.training)
    out = again(rows)
    layer.down.weight.requires_grad_()
    return out


def cast_anew(patch: Patch) -> None:
    graph = module("graph")
    real = graph._forward

    def forward(*given: Any, **options: Any) -> Any:
        again = options.get("is_first_microbatch") is False
        return real(*given, **({**options, "is_first_microbatch": True} if again else options))

    patch.setattr(graph, "_forward", forward)


def given_back(patch: Patch) -> None:
    patch.setattr(te.make_graphed_callables, "_found", (lambda modules, *_, **__: modules, ""))


def evaluation_rolls(patch: Patch) -> None:
    """Transformer Engine takes passes without gradients in like others."""
    manager = te.fp8_state_manager.require()
    real = manager.autocast_exit.__func__

    def leave(cls: Any, *, enabled: bool) -> None:
        with torch.enable_grad():
            real(cls, enabled=enabled)

    patch.setattr(manager, "autocast_exit", classmethod(leave))


FAULTS: dict[str, tuple[Plant, str, set[str]]] = {
    "stale input": (replay(stale_input), "current", {"forward", "grad"}),
    "no gradient": (replay(no_gradient), "block", {"grad", "cached.grad"}),
    "cast anew in each micro-batch": (cast_anew, "delayed", {"cached.history"}),
    "modules given back as they are": (given_back, "current", {"replayed", "cached.replayed"}),
    "an evaluation that rolls": (evaluation_rolls, "delayed", {"evaluation-leaves-no-trace"}),
}


@pytest.mark.parametrize(("plant", "recipe", "wanted"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(plant: Plant, recipe: str, wanted: set[str]) -> None:
    bench = fp8_bench("graphs", recipes=(recipe,))
    check_caught(bench, probe.probe, plant, {f"graphs.{recipe}.{name}" for name in wanted})
