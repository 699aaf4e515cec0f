"""The probe of recomputation passes on the double; a checkpoint that changes something, or a wrong owner, is caught."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope, layer_watch
from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8 import checkpoint as probe
from tests.probes.planting import (
    RECIPES,
    Patch,
    Plant,
    changing,
    check_caught,
    delayed_state,
    failed,
    fp8_bench,
    module,
    putting,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("te_double")
WAYS = ("reentrant", "not-reentrant")


def blocks(bench: Bench, recipe: str = "delayed", **more: Any) -> None:
    enter = nullcontext if recipe == "bf16" else bench.low_precision(recipe)
    probe._check_blocks(bench, enter, delayed=recipe == "delayed", **more)


def test_it_passes_in_every_recipe() -> None:
    bench = fp8_bench("checkpoint")
    probe.probe(bench)
    assert failed(bench) == set()
    names = {check.name for check in bench.checks}
    for way in WAYS:
        assert {f"blocks.delayed.{order}.{way}.amax-once" for order in ("in-turn", "late")} <= names
        assert {f"blocks.{kind}.in-turn.{way}.grad" for kind in ("bf16", *RECIPES)} <= names


def manager() -> Any:
    return te.fp8_state_manager.require()


def scales(give: Any) -> Plant:
    return lambda patch: patch.setattr(manager(), "get_old_fp8_meta_tensors_for_recompute", give)


def lost_amax(real: Any) -> Any:
    def rounded(self: Any, tensor: Any, index: int) -> Any:
        out = real(self, tensor, index)
        if manager().phase == "forward":
            self.amax_history[0, index] = 0.0
        return out

    return rounded


def never_the_same(patch: Patch) -> None:
    layer, count = te.linear.require(), itertools.count()
    real = layer.forward
    patch.setattr(layer, "forward", lambda self, *given, **more: real(self, *given, **more) * (1 + next(count) % 7))


def both(*ends: str) -> set[str]:
    return {f"{way}.{end}" for way in WAYS for end in ends}


distributed = partial(module, "distributed")
AUTOCAST_OFF = changing(distributed, "autocast", lambda real: lambda **given: real(**{**given, "enabled": False}))
FAULTS: dict[str, tuple[Any, Plant, set[str]]] = {
    "scales of the next step": (blocks, scales(lambda _: None), both("grad", "amax-once")),
    "second pass high": (partial(blocks, recipe="block"), AUTOCAST_OFF, both("grad")),
    "an amax that is lost": (blocks, changing(delayed_state, "round", lost_amax), both("amax-once")),
    "never the same": (partial(blocks, recipe="current"), never_the_same, {"steady"}),
    "everything kept": (
        partial(blocks, recipe="current"), putting(layer_watch, "te_recompute", lambda call, rows, **_: call(rows)),
        both("run-again"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("judge", "plant", "wanted"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(judge: Any, plant: Plant, wanted: set[str]) -> None:
    check_caught(fp8_bench("checkpoint"), judge, plant, wanted)


@pytest.mark.parametrize("cell", ["checkpoint", "graphs", "zones"])
@pytest.mark.parametrize("refused", [("delayed",), RECIPES])
def test_recipes_that_are_refused_make_no_pass(monkeypatch: Patch, cell: str, refused: tuple[str, ...]) -> None:
    from megacpp_validate.evidence.receipt import Outcome
    from megacpp_validate.probes import process

    monkeypatch.setattr(fp8_scope, "why_recipe_is_refused", lambda recipe: "no" if recipe in refused else "")
    receipt = process.run_probe(fp8_bench(cell).order)
    assert receipt.outcome is Outcome.NOT_RUN
    assert all(recipe in receipt.reason for recipe in refused)
    assert torch.is_grad_enabled()
