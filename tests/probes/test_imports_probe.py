"""The probe of the firewall and the FP8 scope: clean on both paths; faults of the firewall and of accessors caught."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope, te_fp8
from megacpp_validate.bridge import imports as te
from megacpp_validate.probes import imports as imports_probe
from tests.probes.imports_bench import DOUBLE, NATIVE, Patch, failed, new_bench, run


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
    bench = run("native", NATIVE)
    assert failed(bench) == []
    (scope,) = bench.backends
    assert (scope.requested, scope.claimed, scope.observed) == ("none", "none", ("native",))
    assert "no low-precision recipe" in scope.reasons[0]
    assert {"availability.decided-once", "accessors.none", "scope.second-entry.names-both-places"} <= {
        check.name for check in bench.checks
    }


@pytest.mark.parametrize("seed", range(5))
def test_clean_on_the_double(te_double: None, seed: int) -> None:
    bench = run("te", DOUBLE, seed)
    assert failed(bench) == []
    assert {backend.path: backend.observed for backend in bench.backends} == {
        "scope.production": ("DelayedScaling",),
        "scope.delayed": ("DelayedScaling",),
        "scope.current": ("Float8CurrentScaling",),
        "scope.block": ("Float8BlockScaling",),
        "fp8.delayed": ("te",),
        "fp8.current": ("te",),
        "fp8.block": ("te",),
    }


# --- planted: the firewall --------------------------------------------------------------------------------


def decides_each_time(patch: Patch) -> None:
    def asked() -> bool:
        return not os.environ.get("MEGACPP_DISABLE_TE")

    patch.setattr(te, "is_te_available", asked)


def ignores_the_switch(patch: Patch) -> None:
    from megacpp_validate.bridge import vendor

    patch.setattr(vendor, "_read_switch", lambda variable: "")


def gives_something_while_off(patch: Patch) -> None:
    patch.setattr(te.linear, "_found", (torch.nn.Linear, ""))


def raises_no_next_step(patch: Patch) -> None:
    def require() -> None:
        raise te.VendorEntryMissing("no")

    patch.setattr(te.linear, "require", require)


FIREWALL: dict[str, tuple[Callable[[Patch], None], str]] = {
    "decides-each-time": (decides_each_time, "availability.decided-once"),
    "ignores-the-switch": (ignores_the_switch, "availability.switch"),
    "gives-something-while-off": (gives_something_while_off, "accessors.none"),
    "raises-no-next-step": (raises_no_next_step, "accessors.require"),
}


@pytest.mark.parametrize(("plant", "caught"), FIREWALL.values(), ids=FIREWALL.keys())
def test_a_fault_of_the_firewall(off: None, plant: Callable[[Patch], None], caught: str) -> None:
    te.is_te_available()
    with Patch.context() as patch:
        plant(patch)
        bench = run("native", NATIVE)
    assert caught in failed(bench)


def test_requested_and_not_there(off: None) -> None:
    """A silent fallback of everything."""
    bench = new_bench()
    imports_probe._check_availability(bench)
    assert failed(bench) == ["availability.as-requested"]


# --- planted: accessors and support -----------------------------------------------------------------------


def found(patch: Patch, name: str, value: object, reason: str = "") -> None:
    patch.setattr(getattr(te, name), "_found", (value, reason))


ACCESSORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another": ({"rmsnorm": torch.nn.LayerNorm}, ["accessor.rmsnorm"]),
    "old-name-gone": ({"fp8_autocast": None}, []),
    "both-names-gone": (
        {"quantized_model_init": None, "fp8_model_init": None},
        ["accessor.fp8_model_init", "accessor.quantized_model_init"],
    ),
    "a-recipe-gone": ({"nvfp4_block_scaling": None}, ["accessor.nvfp4_block_scaling"]),
}


@pytest.mark.parametrize(("values", "caught"), ACCESSORS.values(), ids=ACCESSORS.keys())
def test_an_accessor_that_gives_nothing_or_another(te_double: None, values: dict[str, Any], caught: list[str]) -> None:
    bench = new_bench()
    with Patch.context() as patch:
        for name, value in values.items():
            found(patch, name, value, "" if value else "this release never had it")
        imports_probe._check_accessors(bench)
    assert failed(bench) == caught


@pytest.mark.parametrize(
    ("answers", "recipes", "caught"),
    [
        ({"fp8": (False, "too old")}, DOUBLE.recipes, "support.fp8"),
        ({"mxfp8": (True, "")}, DOUBLE.recipes, "support.mxfp8"),  # a surprise
        ({"mxfp8": (True, "")}, (), ""),  # not judged where the row has no recipes
        ({"fp8_block_scaling": (False, "CUDA >= 12.9")}, DOUBLE.recipes, "support.fp8_block_scaling"),
    ],
)
def test_support_that_the_row_does_not_know(
    te_double: None, answers: dict[str, tuple[bool, str]], recipes: tuple[str, ...], caught: str
) -> None:
    bench = new_bench(target=replace(DOUBLE, recipes=recipes))
    right = te_fp8.te_support()
    with Patch.context() as patch:
        patch.setattr(fp8_scope, "te_support", lambda: {**right, **answers})
        imports_probe._check_support(bench)
    assert failed(bench) == ([caught] if caught else [])
    if "mxfp8" in answers:
        assert any("surprise" in check.detail for check in bench.checks)
