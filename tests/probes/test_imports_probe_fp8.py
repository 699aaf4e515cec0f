"""Faults planted in the low-precision scope and in what is computed in it: each is caught by its check."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from megacpp_validate.bridge import fp8_scope, te_fp8
from megacpp_validate.bridge import imports as te
from megacpp_validate.probes import imports as imports_probe
from tests.probes.imports_bench import DOUBLE, Patch, failed, new_bench, run


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are planted in the layer here to see each check fail; a layer that is wrong everywhere is not judged."""
    monkeypatch.setattr("megacpp_validate.probes.imports.is_judged", lambda bench: True)


pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def falls_back(patch: Patch) -> None:
    from megacpp_validate.bridge.backends import Refusal

    patch.setattr(fp8_scope, "_why_not_te", lambda *_: Refusal("te", "planted", "planted"))


def is_not_left(patch: Patch) -> None:
    patch.setattr(fp8_scope.PrecisionScope, "_close", lambda self, *_: None)


def stays_on_after_an_exception(patch: Patch) -> None:
    plain = fp8_scope.PrecisionScope.__exit__

    def leave(self: Any, kind: Any, *rest: Any) -> None:
        if kind is None:
            plain(self, kind, *rest)

    patch.setattr(fp8_scope.PrecisionScope, "__exit__", leave)


def names_no_place(patch: Patch) -> None:
    patch.setattr(fp8_scope, "_place_of_entry", lambda: "somewhere")


def factory_of_the_last(patch: Patch) -> None:
    plain = fp8_scope.group_scope
    patch.setattr(
        fp8_scope, "group_scope", lambda layers, zones, factories: plain(layers, zones, list(reversed(factories)))
    )


def zone_stays_low(patch: Patch) -> None:
    patch.setattr(fp8_scope, "_te_turned_off", lambda _: contextlib.nullcontext())


SCOPE: dict[str, tuple[Callable[[Patch], None], str]] = {
    "falls-back": (falls_back, "scope.current.on"),
    "is-not-left": (is_not_left, "scope.production.restored"),
    "stays-on-after-an-exception": (stays_on_after_an_exception, "scope.delayed.restored-after-an-exception"),
    "names-no-place": (names_no_place, "scope.second-entry.names-both-places"),
    "factory-of-the-last": (factory_of_the_last, "scope.group.2-3-4"),
    "zone-stays-low": (zone_stays_low, "bf16.inside.forward"),
}


@pytest.mark.parametrize(("plant", "caught"), SCOPE.values(), ids=SCOPE.keys())
def test_a_fault_of_the_scope(te_double: None, plant: Callable[[Patch], None], caught: str) -> None:
    with Patch.context() as patch:
        plant(patch)
        bench = new_bench()
        with contextlib.suppress(Exception):  # some faults break what comes after them
            imports_probe.probe(bench)
    assert caught in failed(bench)


# --- planted: numbers and amax ----------------------------------------------------------------------------


def margin(patch: Patch) -> None:
    plain = te_fp8.te_delayed_scaling

    def recipe(**more: Any) -> Any:
        made = plain(**more)
        made.margin = 1
        return made

    patch.setattr(fp8_scope, "te_delayed_scaling", recipe)


def rounds_nothing(patch: Patch) -> None:
    """Low precision is on, and the layer computes as without it: too accurate."""
    for name in ("round_scaled", "round_tensor", "round_blocks"):
        for module in [m for n, m in sys.modules.items() if n.startswith("transformer_engine") and hasattr(m, name)]:
            patch.setattr(module, name, lambda tensor, *_, **__: tensor.float())


def smaller_blocks(patch: Patch) -> None:
    patch.setattr(sys.modules["transformer_engine.pytorch.layer"], "BLOCK", 32)


def with_rounding(change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Damage whatever the layer's product gives."""

    def plant(patch: Patch) -> None:
        layer = te.linear.require()
        plain = layer.forward
        patch.setattr(layer, "forward", lambda self, *args, **more: change(plain(self, *args, **more)))

    return plant


NUMBERS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "margin": (margin, "amax.step0.weight.scale"),
    "rounds-nothing": (rounds_nothing, "fp8.block.forward.applied"),
    "smaller-blocks": (smaller_blocks, "fp8.block.blocks"),
    "x1.01": (with_rounding(lambda out: out * 1.01), "fp8.delayed.forward.applied"),
}


@pytest.mark.parametrize(("plant", "caught"), NUMBERS.values(), ids=NUMBERS.keys())
def test_a_fault_of_the_numbers(te_double: None, plant: Callable[[Patch], None], caught: str) -> None:
    with Patch.context() as patch:
        plant(patch)
        bench = run("te", DOUBLE)
    assert caught in failed(bench)
