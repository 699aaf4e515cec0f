"""The probe of the firewall and the FP8 scope is clean on both paths, and each planted fault fails its check."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.backends import Refusal
from megacpp_validate.probes import imports as probe
from tests.probes.planting import RECIPES, Patch, Plant, after, changing, check_caught, failed, new_bench, putting

pytestmark = pytest.mark.usefixtures("nothing_stays_open")
on_double = partial(new_bench, "imports", "te", RECIPES, production_recipe="delayed")


@pytest.fixture
def off() -> Iterator[None]:
    """Transformer Engine is turned off, whatever is installed here."""
    with Patch.context() as patch:
        patch.setattr(te.TE, "_verdict", None)
        patch.setattr(te.TE, "_presets", {})
        patch.setenv("MEGACPP_DISABLE_TE", "1")
        yield


# --- clean ------------------------------------------------------------------------------------------------


def test_clean_on_the_native_path(off: None) -> None:
    probe.probe(bench := new_bench("imports"))
    assert failed(bench) == set()
    assert [scope.path for scope in bench.backends] == ["scope.production", "scope.eval"]
    for scope in bench.backends:
        assert (scope.requested, scope.claimed, scope.observed) == ("none", "none", ("native",))
        assert "no low-precision recipe" in scope.reasons[0]


def test_clean_on_the_double(te_double: None) -> None:
    probe.probe(bench := on_double())
    assert failed(bench) == set()
    scopes = {f"scope.{name}": ("DelayedScaling",) for name in ("production", "eval", "delayed")}
    scopes |= {"scope.current": ("Float8CurrentScaling",), "scope.block": ("Float8BlockScaling",)}
    assert {row.path: row.observed for row in bench.backends} == {
        **scopes, **{f"fp8.{recipe}": ("te",) for recipe in RECIPES}
    }  # fmt: skip


# --- planted ----------------------------------------------------------------------------------------------


def raises_no_next_step() -> None:
    raise te.VendorEntryMissing("no")


FIREWALL: dict[str, tuple[Plant, str]] = {
    "gives something while off": (putting(te.linear, "_found", (torch.nn.Linear, "")), "accessors.none"),
    "raises no next step": (putting(te.linear, "require", raises_no_next_step), "accessors.require"),
}


@pytest.mark.parametrize(("plant", "caught"), FIREWALL.values(), ids=FIREWALL)
def test_a_fault_of_the_firewall(off: None, plant: Plant, caught: str) -> None:
    te.is_te_available()
    check_caught(new_bench("imports"), probe.probe, plant, {caught})


def test_requested_and_not_there(off: None) -> None:
    """A silent fallback of everything."""
    probe._check_availability(bench := on_double())
    assert failed(bench) == {"availability.as-requested"}


def gone(*names: str) -> Plant:
    return lambda patch: [patch.setattr(getattr(te, name), "_found", (None, "this release lacks it")) for name in names]


ACCESSORS: dict[str, tuple[Plant, set[str]]] = {
    "another": (putting(te.rmsnorm, "_found", (torch.nn.LayerNorm, "")), {"accessor.rmsnorm"}),
    "old name gone": (gone("fp8_autocast"), set()),
    "both names gone": (
        gone("quantized_model_init", "fp8_model_init"), {"accessor.fp8_model_init", "accessor.quantized_model_init"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "caught"), ACCESSORS.values(), ids=ACCESSORS)
def test_an_accessor_that_gives_nothing_or_another(te_double: None, plant: Plant, caught: set[str]) -> None:
    assert check_caught(on_double(), probe._check_accessors, plant, caught) == caught


@pytest.mark.parametrize(
    ("answers", "recipes", "caught"),
    [
        ({"fp8": (False, "too old")}, RECIPES, {"support.fp8"}),
        ({"mxfp8": (True, "")}, RECIPES, {"support.mxfp8"}),  # a surprise
        ({"mxfp8": (True, "")}, (), set()),  # not judged where the row has no recipes
    ],
)
def test_support_that_the_row_does_not_know(
    te_double: None, answers: dict[str, Any], recipes: tuple[str, ...], caught: set[str]
) -> None:
    plant = after(fp8_scope, "te_support", lambda right: {**right, **answers})
    assert check_caught(new_bench("imports", "te", recipes), probe._check_support, plant, caught) == caught


def stays_on_after_an_exception(plain: Any) -> Any:
    return lambda self, kind, *rest: plain(self, kind, *rest) if kind is None else None


def margin(made: Any) -> Any:
    made.margin = 1
    return made


def rounds_nothing(patch: Patch) -> None:
    """Low precision is on, and the layer computes as without it: too accurate."""
    for name in ("round_scaled", "round_tensor", "round_blocks"):
        for module in [m for n, m in sys.modules.items() if n.startswith("transformer_engine") and hasattr(m, name)]:
            patch.setattr(module, name, lambda tensor, *_, **__: tensor.float())


def smaller_blocks(patch: Patch) -> None:
    patch.setattr(sys.modules["transformer_engine.pytorch.layer"], "BLOCK", 32)


FP8: dict[str, tuple[Plant, str]] = {
    "falls back": (putting(fp8_scope, "_why_not_te", lambda *_: Refusal("te", "planted", "planted")),
                   "scope.current.on"),
    "is not left": (putting(fp8_scope.PrecisionScope, "_close", lambda self, *_: None), "scope.production.restored"),
    "stays on after an exception": (changing(fp8_scope.PrecisionScope, "__exit__", stays_on_after_an_exception),
                                    "scope.delayed.restored-after-an-exception"),
    "margin": (after(fp8_scope, "te_delayed_scaling", margin), "amax.step0.weight.scale"),
    "rounds nothing": (rounds_nothing, "fp8.block.forward.applied"),
    "smaller blocks": (smaller_blocks, "fp8.block.blocks"),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "caught"), FP8.values(), ids=FP8)
def test_a_fault_of_the_scope_or_of_the_numbers(te_double: None, plant: Plant, caught: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(probe, "is_judged", lambda bench: True)  # else a layer that is wrong everywhere is left out
    te.linear.require()
    check_caught(on_double(), probe.probe, plant, {caught})
