"""The linear walker's probe: it passes on both paths as they are, and every planted fault fails a check by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402

from megacpp_validate.bridge import linear_walker  # noqa: E402
from megacpp_validate.probes import linear_walker as probe_module  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.linear_walker import EXPECTED, hybrid_tree  # noqa: E402
from tests.probes.planted_numbers import RECIPES, VALUES, failed, in_gradient, run_probe  # noqa: E402

Fault = Callable[[Any], Any]


run = partial(run_probe, probe_module)


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    bench = run("native", quick=quick)
    assert failed(bench) == set()
    assert len(bench.checks) > 90
    assert {backend.claimed for backend in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("quick", [True, False])
def test_transformer_engine_passes_in_every_recipe(quick: bool) -> None:
    bench = run("te", RECIPES, quick=quick)
    assert failed(bench) == set()
    assert {(backend.claimed, backend.observed) for backend in bench.backends} == {("te", ("te",))}
    names = {check.name for check in bench.checks}
    for case in ("fp32.bias", "bf16.bias", *(f"{recipe}.bias" for recipe in RECIPES)):
        for tensor in ("forward", "grad.input", "grad.weight", "grad.bias"):
            assert f"{case}.{tensor}" in names


def test_te_requested_and_not_there_is_a_failure() -> None:
    bench = run("te")
    assert {"plan.blocks.0.attn.q_proj", "swap.tied.fc1", "fp32.bias.backend"} <= failed(bench)


@pytest.mark.usefixtures("te_double")
def test_a_recipe_without_a_reference_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "recipes", ("nvfp4",))  # the double has no such GPU
    assert failed(run("te", ("nvfp4",))) == {"nvfp4.reference"}


def test_the_tree_holds_every_exclusion() -> None:
    assert {row.code for row in linear_walker.EXCLUSIONS} <= set(EXPECTED.values())
    assert {"wraps-linear", "tied-embedding", "hooks", "not-listed", "listed"} <= set(EXPECTED.values())
    modules = dict(hybrid_tree("cpu").named_modules(remove_duplicate=False))
    assert {name for name, module in modules.items() if isinstance(module, nn.Linear)} <= set(EXPECTED)


# --- faults of decisions ----------------------------------------------------------------------------------------------


def without(code: str) -> Callable[[pytest.MonkeyPatch], None]:
    rows = tuple(row for row in linear_walker.EXCLUSIONS if row.code != code)
    return lambda patch: patch.setattr(linear_walker, "EXCLUSIONS", rows)


def replaced(module: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, name, value)


def lost_siblings(patch: pytest.MonkeyPatch) -> None:
    """The known fault: a walk that returns at the first thing it does not swap."""
    real = linear_walker.read_places

    def read(root: Any) -> Iterator[Any]:
        stop = False
        for place in real(root):
            if place.name.startswith("blocks.1.moe.") and stop:
                continue
            stop = stop or place.name == "blocks.1.moe.router"
            yield place

    patch.setattr(linear_walker, "read_places", read)


def opened_wrappers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear_walker, "is_wrapper", lambda _: False)
    patch.setattr(linear_walker, "wraps_child", lambda *_: False)


def copied_parameters(patch: pytest.MonkeyPatch) -> None:
    real = linear_walker._build

    def build(linear: Any, name: str) -> Any:
        layer = real(linear, name)
        for part, value in list(layer.named_parameters()):
            setattr(layer, part, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
        return layer

    patch.setattr(linear_walker, "_build", build)


def no_order_of_building(patch: pytest.MonkeyPatch) -> None:
    """Layers are put in one by one, and stay where a later one fails."""

    def put(tree: Any, layers: Any) -> None:
        for name, layer in layers.items():
            above, _, child = name.rpartition(".")
            tree.get_submodule(above).add_module(child, layer)

    patch.setattr(linear_walker, "_put", put)


def one_more_name(patch: pytest.MonkeyPatch) -> None:
    real = linear_walker._build

    def build(linear: Any, name: str) -> Any:
        layer = real(linear, name)
        layer.register_buffer("scale", torch.ones(1))
        return layer

    patch.setattr(linear_walker, "_build", build)


def shared_built_twice(patch: pytest.MonkeyPatch) -> None:
    real = linear_walker._put

    def put(tree: Any, layers: Any) -> None:
        real(tree, {name: copy.deepcopy(layer) if "experts_again" in name else layer for name, layer in layers.items()})

    patch.setattr(linear_walker, "_put", put)


def changing_while_planning(patch: pytest.MonkeyPatch) -> None:
    real = linear_walker._judge

    def judge(places: Any, *rest: Any) -> Any:
        places[0].module.register_module("seen", nn.Identity())
        return real(places, *rest)

    patch.setattr(linear_walker, "_judge", judge)


PLANTED = {
    "router swapped": (without("moe-router"), {"plan.blocks.1.moe.gate", "swap.pinned.blocks.1.moe.router"}),
    "mod router swapped": (without("mod-router"), {"plan.blocks.0.mod_router"}),
    "mhc swapped": (without("mhc-score"), {"plan.blocks.0.mhc.score"}),
    "n-gram swapped": (without("ngram-hash"), {"plan.ngram_hash.q_proj", "swap.ngram_hash.q_proj"}),
    "structure swapped": (without("structure-embedding"), {"plan.structure_embedding.proj"}),
    "lora swapped": (without("lora"), {"plan.blocks.0.attn.v_proj.lora_A.default"}),
    "wrapper opened": (
        opened_wrappers,
        {"plan.blocks.0.attn.v_proj.base_layer"},
    ),
    "tied head": (replaced(linear_walker, "_by_tie", lambda *_: None), {"plan.lm_head"}),
    "hooks lost": (
        replaced(linear_walker, "_by_state", lambda *_: None),
        {"plan.blocks.0.attn.k_proj", "swap.blocks.0.attn.k_proj", "refuses.stale-plan"},
    ),
    "alignment": (replaced(linear_walker, "_by_numbers", lambda *_: None), {"plan.alignment"}),
    "siblings lost": (lost_siblings, {"plan.names", "plan.blocks.1.moe.gate", "swap.blocks.1.moe.experts.0.w1"}),
    "untied": (copied_parameters, {"swap.tie.linears"}),
    "not atomic": (no_order_of_building, {"swap.atomic"}),
    "not shared": (shared_built_twice, {"swap.tie.shared"}),
    "no dry run": (changing_while_planning, {"plan.dry-run"}),
    "checkpoints": (one_more_name, {"swap.state-dict", "swap.loads-native"}),
    "stale plan": (replaced(linear_walker, "_hold_plan", lambda *_: None), {"refuses.stale-plan"}),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "caught"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_of_the_walk_is_caught(plant: Any, caught: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "DTYPES", {})  # the walk alone
    plant(monkeypatch)
    assert caught <= failed(run("te"))


def test_a_walk_that_swaps_without_te_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_walker, "why_not_te", lambda *_: None)
    monkeypatch.setattr(linear_walker, "_build", lambda linear, name: copy.deepcopy(linear))
    assert {"plan.tied.fc1", "swap.tied.fc1", "fp32.bias.backend"} <= failed(run("native"))


# --- faults of numbers ------------------------------------------------------------------------------------------------


def seen_in(fault: Fault) -> tuple[str, ...]:
    """Where a fault must be seen: one hundredth is less than FP8 itself is off by, at these sizes."""
    return ("fp32", "bf16") if fault is VALUES["x1.01"] else ("fp32", "bf16", *RECIPES)


def faulty(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], Any]) -> None:
    """Every layer that TE builds calls `change(forward, rows)` instead of its own forward."""
    real = linear_walker.TeLinear

    class Faulty(real):  # type: ignore[misc, valid-type]
        def __init__(self, module: Any, *, name: str) -> None:
            super().__init__(module, name=name)
            own = self.inner.forward
            self.inner.forward = lambda rows: change(own, rows)

    monkeypatch.setattr(linear_walker, "TeLinear", Faulty)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("part", ["forward", "grad.input"])
@pytest.mark.parametrize("fault", VALUES.values(), ids=VALUES)
def test_a_wrong_value_is_caught_in_every_precision(fault: Fault, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "forward":
        faulty(monkeypatch, lambda forward, rows: fault(forward(rows)))
    else:
        faulty(monkeypatch, lambda forward, rows: forward(in_gradient(fault)(rows)))
    assert {f"{precision}.bias.{part}" for precision in seen_in(fault)} <= failed(run("te", RECIPES))


def drop_bias(forward: Any, rows: Any) -> Any:
    layer = forward.__self__
    bias, layer.use_bias = layer.use_bias, False
    try:
        return forward(rows)
    finally:
        layer.use_bias = bias


def by_torch(forward: Any, rows: Any) -> Any:
    return nn.functional.linear(
        rows, forward.__self__.weight, forward.__self__.bias if forward.__self__.use_bias else None
    )


def without_weight_gradient(forward: Any, rows: Any) -> Any:
    forward.__self__.weight.requires_grad_(False)
    return forward(rows)


def rows_misread(forward: Any, rows: Any) -> Any:
    return forward(rows.as_strided(rows.shape, torch.empty(rows.shape).stride()))


LAYERS = {
    "bias dropped": (drop_bias, {"bf16.bias.forward", "bf16.bias.grad.bias", "delayed.bias.forward"}),
    "native instead": (by_torch, {"fp32.bias.backend", "delayed.bias.backend"}),
    "strides ignored": (rows_misread, {"fp32.transposed.forward", "bf16.transposed.forward"}),
    "weight without a gradient": (without_weight_gradient, {"bf16.bias.grad.weight", "delayed.bias.grad.weight"}),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("change", "caught"), LAYERS.values(), ids=LAYERS)
def test_a_faulty_layer_is_caught(change: Any, caught: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, change)
    assert caught <= failed(run("te", ("delayed",)))


@pytest.mark.usefixtures("te_double")
def test_weights_that_were_not_handed_over_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = linear_walker.TeLinear
    monkeypatch.setattr(linear_walker, "_build", lambda linear, name: real(linear, name=name).inner)
    assert {"swap.weights", "swap.tie.linears", "fp32.bias.forward"} <= failed(run("te"))
