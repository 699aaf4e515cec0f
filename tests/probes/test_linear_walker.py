"""The probe of the linear walker passes on both paths, and each planted fault fails the check meant for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megacpp_validate.bridge import linear_walker
from megacpp_validate.probes import linear_walker as probe
from megacpp_validate.probes.linear_walker import EXPECTED, hybrid_tree
from tests.probes.planting import (
    RECIPES,
    Plant,
    changing,
    check_caught,
    failed,
    new_bench,
    putting,
    run_probe,
)  # fmt: skip

run = partial(run_probe, probe)


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    bench = run("native", quick=quick)
    assert failed(bench) == set()
    assert {backend.claimed for backend in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("quick", [True, False])
def test_transformer_engine_passes_in_every_recipe(quick: bool) -> None:
    bench = run("te", RECIPES, quick=quick)
    assert failed(bench) == set()
    assert {(backend.claimed, backend.observed) for backend in bench.backends} == {("te", ("te",))}


def test_te_requested_and_not_there_is_a_failure() -> None:
    assert {"swap.tied.fc1", "fp32.bias.backend"} <= failed(run("te"))


def test_the_tree_holds_every_exclusion() -> None:
    codes = {row.code for row in linear_walker.EXCLUSIONS} | {"wraps-linear", "tied-embedding", "hooks", "not-listed"}
    assert codes | {"listed"} == set(EXPECTED.values())
    modules = dict(hybrid_tree("cpu").named_modules(remove_duplicate=False))
    assert {name for name, module in modules.items() if isinstance(module, nn.Linear)} <= set(EXPECTED)


def without(code: str) -> Plant:
    return putting(linear_walker, "EXCLUSIONS", tuple(row for row in linear_walker.EXCLUSIONS if row.code != code))


def lost_siblings(real: Any) -> Any:
    """The known fault: a walk that returns at the first thing it does not swap."""

    def read(root: Any) -> Iterator[Any]:
        stop = False
        for place in real(root):
            if not (place.name.startswith("blocks.1.moe.") and stop):
                stop = stop or place.name == "blocks.1.moe.router"
                yield place

    return read


def building(change: Callable[[Any], object]) -> Plant:
    """Something is done to each layer that is built."""

    def make(real: Any) -> Any:
        def build(linear: Any, name: str) -> Any:
            layer = real(linear, name)
            change(layer)
            return layer

        return build

    return changing(linear_walker, "_build", make)


def opened(patch: Any) -> None:
    patch.setattr(linear_walker, "is_wrapper", lambda _: False)
    patch.setattr(linear_walker, "wraps_child", lambda *_: False)


def faulty(change: Callable[[Any, Any], Any]) -> Plant:
    """Every layer that TE builds calls `change(forward, rows)` instead of its own forward."""

    def make(real: Any) -> Any:
        class Faulty(real):  # type: ignore[misc]
            def __init__(self, module: Any, *, name: str) -> None:
                super().__init__(module, name=name)
                own = self.inner.forward
                self.inner.forward = lambda rows: change(own, rows)

        return Faulty

    return changing(linear_walker, "TeLinear", make)


def without_weight_gradient(forward: Any, rows: Any) -> Any:
    forward.__self__.weight.requires_grad_(False)
    return forward(rows)


FAULTS: dict[str, tuple[Plant, set[str]]] = {
    "router": (without("moe-router"), {"plan.blocks.1.moe.gate"}),
    "wrapper opened": (opened, {"plan.blocks.0.attn.v_proj.base_layer"}),
    "alignment": (putting(linear_walker, "_by_numbers", lambda *_: None), {"plan.alignment"}),
    "siblings lost": (
        changing(linear_walker, "read_places", lost_siblings), {"swap.blocks.1.moe.experts.0.w1"},
    ),
    "checkpoints": (
        building(lambda layer: layer.register_buffer("scale", torch.ones(1))), {"swap.state-dict", "swap.loads-native"},
    ),
    "weight without a gradient": (
        faulty(without_weight_gradient), {"bf16.bias.grad.weight", "delayed.bias.grad.weight"}
    ),
}  # fmt: skip


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "wanted"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("linear_walker", "te", ("delayed",)), probe.probe, plant, wanted)
