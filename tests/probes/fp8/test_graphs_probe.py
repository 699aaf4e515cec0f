"""The probe of CUDA graphs: what is right passes, and each fault of a replay is told by the check that it is about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope, graph_capture
from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8 import graphs as probe
from megacpp_validate.probes.fp8.stacks import scope_of
from tests.probes.fp8.planting import failed, new_bench

pytestmark = pytest.mark.usefixtures("te_double")
Patch = pytest.MonkeyPatch


def run(*recipes: str) -> Bench:
    bench = new_bench("graphs", recipes=recipes or ("delayed", "current", "block"))
    probe.probe(bench)
    return bench


def misuse(*recipes: str) -> Bench:
    bench = new_bench("graphs", recipes=recipes or ("delayed", "current"))
    with bench.scope("graphs.misuse"):
        probe._check_misuse(bench)
    return bench


def graph_module() -> Any:
    import transformer_engine.pytorch.graph as module

    return module


def test_it_passes_in_every_recipe() -> None:
    bench = run()
    assert failed(bench) == set()
    names = {check.name for check in bench.checks}
    wanted = {"forward", "grad", "eval-fp8", "eval-bf16", "outputs-move", "replayed"}
    for recipe in ("delayed", "current", "block"):
        for kind in (recipe, f"{recipe}.cached"):
            assert {f"graphs.{kind}.{name}" for name in wanted} <= names
    assert {"graphs.delayed.history", "graphs.delayed.scale", "graphs.delayed.amax-moves"} <= names
    assert sum(name.startswith("graphs.misuse.") for name in names) == 7


def test_it_takes_more_than_twenty_steps_on_a_gpu() -> None:
    assert probe.STEPS >= 20
    assert max(probe.EVALUATED) < probe.STEPS
    assert {"fp8", "bf16"} == set(probe.EVALUATED.values())


def replay(patch: Patch, change: Callable[..., Any]) -> None:
    """Let `change(plain replay, module, ...)` stand for a replay."""
    module = graph_module()
    real = module._forward

    def forward(layer: Any, plain: Any, samples: Any, *rest: Any, **options: Any) -> Any:
        return change(lambda *given: real(layer, plain, samples, *rest[:3], *given, **options), layer, *rest[3:])

    patch.setattr(module, "_forward", forward)


def stale_input(patch: Patch) -> None:
    """The first input is replayed for ever."""
    first: dict[int, Any] = {}

    def change(replayed: Any, layer: Any, rows: Any) -> Any:
        if not layer.training:
            return replayed(rows)
        kept = first.setdefault(id(layer), rows.detach().clone())
        return replayed(rows - rows.detach() + kept)

    replay(patch, change)


def stale_weights(patch: Patch) -> None:
    """What was cast at the capture is used for ever."""
    first: dict[int, list[Any]] = {}

    def change(replayed: Any, layer: Any, rows: Any) -> Any:
        kept = first.setdefault(id(layer), [weight.detach().clone() for weight in layer.parameters()])
        moved = [weight.detach().clone() for weight in layer.parameters()]
        with torch.no_grad():
            for weight, old in zip(layer.parameters(), kept, strict=True):
                weight.data.copy_(old)
        out = replayed(rows)
        with torch.no_grad():
            for weight, new in zip(layer.parameters(), moved, strict=True):
                weight.data.copy_(new)
        return out

    replay(patch, change)


def stuck(patch: Patch) -> None:
    """One output for ever."""
    first: dict[int, Any] = {}

    def change(replayed: Any, layer: Any, rows: Any) -> Any:
        out = replayed(rows)
        return out - out.detach() + first.setdefault(id(layer), out.detach().clone()) if layer.training else out

    replay(patch, change)


def frozen_amax(patch: Patch) -> None:
    """Scales do not follow under a replay."""

    def change(replayed: Any, layer: Any, rows: Any) -> Any:
        out = replayed(rows)
        for state in graph_module()._states(layer) if layer.training else ():
            state.amax_history[0].zero_()
        return out

    replay(patch, change)


def evaluation_spoils(patch: Patch) -> None:
    """After an evaluation the scales that a graph reads are another's."""

    def change(replayed: Any, layer: Any, rows: Any) -> Any:
        out = replayed(rows)
        for state in graph_module()._states(layer) if not layer.training else ():
            state.scale.mul_(0.25)
        return out

    replay(patch, change)


def no_gradient(patch: Patch) -> None:
    """One weight's gradient is not among what the graph gives."""

    def change(replayed: Any, layer: Any, rows: Any) -> Any:
        layer.down.weight.requires_grad_(not layer.training)
        out = replayed(rows)
        layer.down.weight.requires_grad_()
        return out

    replay(patch, change)


def in_evaluation(patch: Patch) -> None:
    """An evaluation replays the training pass."""

    def change(replayed: Any, layer: Any, rows: Any) -> Any:
        out = replayed(rows)
        return out if layer.training else out * 1.5

    replay(patch, change)


@pytest.mark.parametrize(("plant", "recipe", "wanted"), [
    (stale_input, "current", {"graphs.current.forward", "graphs.current.grad"}),
    (stuck, "current", {"graphs.current.forward", "graphs.current.outputs-move"}),
    (stale_weights, "current", {"graphs.current.forward", "graphs.current.grad"}),
    (frozen_amax, "delayed", {"graphs.delayed.history", "graphs.delayed.scale", "graphs.delayed.cached.history"}),
    (evaluation_spoils, "delayed", {"graphs.delayed.scale", "graphs.delayed.forward"}),
    (no_gradient, "block", {"graphs.block.grad", "graphs.block.cached.grad"}),
    (in_evaluation, "block", {"graphs.block.eval-fp8", "graphs.block.eval-bf16"}),
])  # fmt: skip
def test_a_replay_that_does_something_else_is_caught(
    monkeypatch: Patch, plant: Callable[[Patch], None], recipe: str, wanted: set[str]
) -> None:
    plant(monkeypatch)
    found = failed(run(recipe))
    assert wanted <= found
    assert not any(name.startswith("graphs.misuse") for name in found)


def test_a_weight_cast_anew_in_each_micro_batch_only_is_none(monkeypatch: Patch) -> None:
    """With cached weights a later micro-batch takes the first one's: what takes its own under other scales is seen."""
    module = graph_module()
    real = module._forward

    def forward(*given: Any, **options: Any) -> Any:
        first = options.get("is_first_microbatch")
        return real(*given, **({**options, "is_first_microbatch": True} if first is False else options))

    monkeypatch.setattr(module, "_forward", forward)
    assert {"graphs.delayed.cached.history"} <= failed(run("delayed"))


def test_an_evaluation_that_leaves_its_amax_behind_is_caught(monkeypatch: Patch) -> None:
    bench = new_bench("graphs", recipes=("delayed",))
    monkeypatch.setattr(fp8_scope, "pending_amax_kept", nullcontext)
    probe._check_no_trace(bench, scope_of(bench, "delayed"))
    assert failed(bench) == {"graphs.delayed.evaluation-leaves-no-trace"}


def test_an_evaluation_that_rolls_the_history_is_caught(monkeypatch: Patch) -> None:
    """Planted: Transformer Engine takes passes without gradients in like others."""
    manager = te.fp8_state_manager.require()
    real = manager.autocast_exit.__func__

    def leave(cls: Any, *, enabled: bool) -> None:
        with torch.enable_grad():
            real(cls, enabled=enabled)

    bench = new_bench("graphs", recipes=("delayed",))
    monkeypatch.setattr(manager, "autocast_exit", classmethod(leave))
    probe._check_no_trace(bench, scope_of(bench, "delayed"))
    assert failed(bench) == {"graphs.delayed.evaluation-leaves-no-trace"}


def test_modules_that_are_given_back_as_they_are_are_no_replay(monkeypatch: Patch) -> None:
    monkeypatch.setattr(te.make_graphed_callables, "_found", (lambda modules, *_, **__: modules, ""))
    found = failed(run("current"))
    assert found == {"graphs.current.replayed", "graphs.current.cached.replayed"}


def test_a_release_without_graphs_is_no_replay(monkeypatch: Patch) -> None:
    monkeypatch.setattr(te.make_graphed_callables, "_found", (None, "this release has none"))
    assert {"graphs.current.replayed", "graphs.current.cached.replayed"} <= failed(run("current"))
    assert {"graphs.misuse.outside-of-the-scope", "graphs.misuse.other-recipe"} <= failed(misuse())


def test_scales_made_anew_are_looked_for(monkeypatch: Patch) -> None:
    """Transformer Engine does that where a layer runs in another recipe; the double does not by itself."""
    from transformer_engine.pytorch.layer import TransformerEngineBaseModule as Base

    real = Base.start

    def start(self: Any, *given: Any) -> Any:
        rounder, last = real(self, *given)
        if rounder is not None and not rounder.recipe.delayed():
            self.fp8_meta.pop("scaling_fwd", None)
            self.fp8_meta["recipe"] = None
        return rounder, last

    monkeypatch.setattr(Base, "start", start)
    bench = misuse()
    assert failed(bench) == set()
    said = next(check.detail for check in bench.checks if check.name == "graphs.misuse.state-made-anew")
    assert said.startswith("GraphMisused: up.fp8_meta.scaling_fwd")


@pytest.mark.parametrize(("guard", "wanted"), [
    ("_check_inputs", {"other-shape"}),
    ("_is_same", {"other-weights"}),
])  # fmt: skip
def test_a_bridge_that_does_not_look_is_caught(monkeypatch: Patch, guard: str, wanted: set[str]) -> None:
    monkeypatch.setattr(graph_capture, guard, lambda *_: True)
    assert failed(misuse()) == {f"graphs.misuse.{name}" for name in wanted}


def test_a_bridge_that_replays_anywhere_is_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(graph_capture._Precision, "is_now", lambda _: True)
    names = ("outside-of-the-scope", "other-recipe", "evaluated-in-another-recipe")
    assert failed(misuse()) == {f"graphs.misuse.{name}" for name in names}
