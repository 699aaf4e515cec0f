"""Faults planted in the low-precision scope and in what is computed in it: each is caught by its check."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope, te_fp8
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.fp8_scope import Zones
from megacpp_validate.probes import imports as imports_probe
from tests.probes.imports_bench import DOUBLE, Patch, failed, new_bench, run


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are planted in the layer here to see each check fail; a layer that is wrong everywhere is not judged."""
    monkeypatch.setattr("megacpp_validate.probes.imports.is_judged", lambda bench: True)


pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def scope_is_never_on(patch: Patch) -> None:
    patch.setattr(fp8_scope, "te_scope", lambda **_: contextlib.nullcontext())


def scope_claims_te_and_stays_native(patch: Patch) -> None:
    patch.setattr(fp8_scope, "_te_turned_on", lambda *_: contextlib.nullcontext())


def falls_back(patch: Patch) -> None:
    from megacpp_validate.bridge.backends import Refusal

    patch.setattr(fp8_scope, "_why_not_te", lambda *_: Refusal("te", "planted", "planted"))


def another_recipe(patch: Patch) -> None:
    patch.setattr(fp8_scope, "te_delayed_scaling", lambda **_: te_fp8.te_current_scaling())


def another_block(patch: Patch) -> None:
    patch.setitem(fp8_scope._RECIPES, "block", ("fp8_block_scaling", te_fp8.te_current_scaling))


def stays_on(patch: Patch) -> None:
    """Transformer Engine does not put its state back."""
    manager = te.fp8_state_manager.require()
    patch.setattr(manager, "restore", lambda kept: None)


def is_not_left(patch: Patch) -> None:
    patch.setattr(fp8_scope.PrecisionScope, "_close", lambda self, *_: None)


def stays_on_after_an_exception(patch: Patch) -> None:
    plain = fp8_scope.PrecisionScope.__exit__

    def leave(self: Any, kind: Any, *rest: Any) -> None:
        if kind is None:
            plain(self, kind, *rest)

    patch.setattr(fp8_scope.PrecisionScope, "__exit__", leave)


def enters_twice(patch: Patch) -> None:
    patch.setattr(fp8_scope.PrecisionScope, "__enter__", unguarded_entry)
    patch.setattr(fp8_scope, "te_state", lambda: {"enabled": False, "calibrating": False})


def unguarded_entry(self: Any) -> Any:
    plan, place = self.plan, fp8_scope._place_of_entry()
    self._turned = plan.turn(place)
    self._turned.__enter__()
    self.scope = fp8_scope.Scope(plan.recipe, plan.choice, place, plan.reason)
    fp8_scope._around.set((*fp8_scope.open_here(), self))
    return self.scope


def names_no_place(patch: Patch) -> None:
    patch.setattr(fp8_scope, "_place_of_entry", lambda: "somewhere")


def zone_ignored(patch: Patch) -> None:
    patch.setattr(Zones, "why_group_is_bf16", lambda self, layers: "")


def only_the_first_is_looked_at(patch: Patch) -> None:
    patch.setattr(Zones, "why_group_is_bf16", lambda self, layers: self.why_bf16(layers[0]))


def factory_of_the_last(patch: Patch) -> None:
    plain = fp8_scope.group_scope
    patch.setattr(
        fp8_scope, "group_scope", lambda layers, zones, factories: plain(layers, zones, list(reversed(factories)))
    )


def zone_stays_low(patch: Patch) -> None:
    patch.setattr(fp8_scope, "_te_turned_off", lambda _: contextlib.nullcontext())


SCOPE: dict[str, tuple[Callable[[Patch], None], str]] = {
    "never-on": (scope_is_never_on, "scope.delayed.on"),
    "claims-te": (scope_claims_te_and_stays_native, "scope.production.on"),
    "falls-back": (falls_back, "scope.current.on"),
    "another-recipe": (another_recipe, "scope.delayed.on"),
    "another-block": (another_block, "scope.block.on"),
    "stays-on": (stays_on, "scope.production.restored"),
    "is-not-left": (is_not_left, "scope.production.restored"),
    "stays-on-after-an-exception": (stays_on_after_an_exception, "scope.delayed.restored-after-an-exception"),
    "enters-twice": (enters_twice, "scope.second-entry.refused"),
    "names-no-place": (names_no_place, "scope.second-entry.names-both-places"),
    "zone-ignored": (zone_ignored, "scope.group.1-2"),
    "only-the-first-is-looked-at": (only_the_first_is_looked_at, "scope.group.4-5"),
    "factory-of-the-last": (factory_of_the_last, "scope.group.2-3-4"),
    "zone-stays-low": (zone_stays_low, "bf16.inside.forward"),
    "never-on-numbers": (scope_is_never_on, "fp8.current.forward.applied"),
    "another-recipe-numbers": (another_recipe, "fp8.delayed.forward.applied"),
    "another-block-numbers": (another_block, "fp8.block.wgrad.applied"),
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


def scaling() -> Any:
    return sys.modules["transformer_engine.pytorch.scaling"]


def history_does_not_roll(patch: Patch) -> None:
    plain = scaling().DelayedState.update

    def update(self: Any) -> None:
        kept = self.amax_history.clone()
        plain(self)
        self.amax_history.copy_(kept)

    patch.setattr(scaling().DelayedState, "update", update)


def scale_frozen_at_1(patch: Patch) -> None:
    plain = scaling().DelayedState.update

    def update(self: Any) -> None:
        plain(self)
        self.scale.fill_(1.0)

    patch.setattr(scaling().DelayedState, "update", update)


def stale_amax(patch: Patch) -> None:
    """The scale follows the first step's amax for ever."""
    plain = scaling().DelayedState.update

    def update(self: Any) -> None:
        kept = getattr(self, "kept", None)
        plain(self)
        if kept is not None:
            self.scale.copy_(kept)
        self.kept = self.scale.clone()

    patch.setattr(scaling().DelayedState, "update", update)


def most_recent_instead_of_max(patch: Patch) -> None:
    plain = te_fp8.te_delayed_scaling

    def recipe(**more: Any) -> Any:
        made = plain(**more)
        made.amax_compute_algo = "most_recent"
        return made

    patch.setattr(fp8_scope, "te_delayed_scaling", recipe)


def margin(patch: Patch) -> None:
    plain = te_fp8.te_delayed_scaling

    def recipe(**more: Any) -> Any:
        made = plain(**more)
        made.margin = 1
        return made

    patch.setattr(fp8_scope, "te_delayed_scaling", recipe)


def gradients_in_e4m3(patch: Patch) -> None:
    patch.setattr(te_fp8, "te_format", lambda name: te.fp8_format.require().E4M3)


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


def one_value_is_none(out: Any) -> Any:
    hole = torch.zeros_like(out)
    hole[0, 0] = float("nan")
    return out + hole


NUMBERS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "history-does-not-roll": (history_does_not_roll, "amax.step1.input.history"),
    "scale-frozen-at-1": (scale_frozen_at_1, "amax.step0.gradient.scale"),
    "scale-frozen-at-1-seen-in-values": (scale_frozen_at_1, "fp8.delayed.forward.applied"),
    "stale-amax": (stale_amax, "amax.step1.input.scale"),
    "most-recent-instead-of-max": (most_recent_instead_of_max, "amax.step2.input.scale"),
    "margin": (margin, "amax.step0.weight.scale"),
    "gradients-in-e4m3": (gradients_in_e4m3, "fp8.current.dgrad.applied"),
    "rounds-nothing": (rounds_nothing, "fp8.block.forward.applied"),
    "smaller-blocks": (smaller_blocks, "fp8.block.blocks"),
    "zeros": (with_rounding(lambda out: out * 0), "bf16.outside.forward"),
    "x0.5": (with_rounding(lambda out: out * 0.5), "fp8.delayed.forward"),
    "x1.01": (with_rounding(lambda out: out * 1.01), "fp8.delayed.forward.applied"),
    "sign": (with_rounding(lambda out: -out), "fp8.current.forward"),
    "one-row": (with_rounding(lambda out: torch.cat([out[1:2], out[1:]])), "fp8.block.forward"),
    "nan": (with_rounding(one_value_is_none), "fp8.block.forward"),
    "scaled-gradient": (with_rounding(lambda out: (out - out.detach()) * 2 + out.detach()), "fp8.current.wgrad"),
}


@pytest.mark.parametrize(("plant", "caught"), NUMBERS.values(), ids=NUMBERS.keys())
def test_a_fault_of_the_numbers(te_double: None, plant: Callable[[Patch], None], caught: str) -> None:
    with Patch.context() as patch:
        plant(patch)
        bench = run("te", DOUBLE)
    assert caught in failed(bench)
