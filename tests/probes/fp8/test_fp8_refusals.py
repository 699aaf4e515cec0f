"""What the FP8 path refuses: each refusal that is missing, or names the wrong thing, is caught by its check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import extra_state, fp8_scope, layer_watch, recipes, te_fp8
from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.fp8.recipe import _scope_of, check_refusals
from tests.probes.fp8.planting import Patch, Plant, failed, new_bench

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def scopes_nest(patch: Patch) -> None:
    def enter(self: Any) -> Any:
        self.scope = fp8_scope.Scope(self.plan.recipe, self.plan.choice, fp8_scope._place_of_entry())
        return self.scope

    patch.setattr(fp8_scope.PrecisionScope, "__enter__", enter)


def any_target(patch: Patch) -> None:
    patch.setattr(recipes, "_check_machine", lambda row: None)


def any_history(patch: Patch) -> None:
    patch.setattr(te_fp8, "te_delayed_scaling", lambda **_: None)


def nothing_refused(patch: Patch) -> None:
    patch.setattr(layer_watch, "_refuse", lambda *_: None)


def everything_refused(patch: Patch) -> None:
    patch.setattr(layer_watch, "TRAINING_ROWS", 7)


def takes_8_rows(patch: Patch) -> None:
    patch.setattr(layer_watch, "TRAINING_ROWS", 8)


def nan_is_left_out(patch: Patch) -> None:
    plain = torch.maximum
    patch.setattr(torch, "maximum", lambda a, b, **more: plain(a, b.nan_to_num(0.0), **more))


def gradients_unseen(patch: Patch) -> None:
    patch.setattr(layer_watch.Fp8Guard, "_after", lambda self, *_: None)


def with_not_finite(change: Callable[..., tuple[Any, ...]]) -> Plant:
    def plant(patch: Patch) -> None:
        plain = layer_watch._not_finite
        patch.setattr(layer_watch, "_not_finite", lambda *given: plain(*change(*given)))

    return plant


def never_emptied(patch: Patch) -> None:
    patch.setattr(torch.Tensor, "zero_", lambda self: self)


def loads_all(patch: Patch) -> None:
    patch.setattr(extra_state, "check_fp8_state", lambda *_, **__: None)


def loads_half(patch: Patch) -> None:
    plain = extra_state.check_fp8_state

    def check(module: Any, state: Any, **more: Any) -> None:
        with torch.no_grad():
            module.first.weight.copy_(state["first.weight"])
        plain(module, state, **more)

    patch.setattr(extra_state, "check_fp8_state", check)


def own_state_refused(patch: Patch) -> None:
    plain = extra_state.check_fp8_state

    def check(module: Any, state: Any, *, recipe: Any, **more: Any) -> None:
        plain(module, state, recipe="block" if recipe == "delayed" else recipe, **more)

    patch.setattr(extra_state, "check_fp8_state", check)


def reads_none(self: Any, state: Any) -> None:
    if state is not None and state.numel():
        raise RuntimeError("Refusing to load")


def own_state_half_loaded(patch: Patch) -> None:
    """The first layer's weight is loaded when the release refuses the second's state."""
    patch.setattr(te.linear.require(), "set_extra_state", reads_none)
    plain = extra_state._try_one

    def try_one(module: Any, state: Any) -> None:
        with torch.no_grad():
            module.first.weight.copy_(state["first.weight"])
        plain(module, state)

    patch.setattr(extra_state, "_try_one", try_one)


REFUSED: dict[str, tuple[Plant, str]] = {
    "scopes-nest": (scopes_nest, "second-entry"),
    "any-target": (any_target, "target.h200"),
    "any-history": (any_history, "history.0"),
    "rows-not-refused": (nothing_refused, "rows.24"),
    "multiple-not-named": (takes_8_rows, "rows.5.says"),
    "takes-8-rows": (takes_8_rows, "rows.24"),
    "layer-not-named": (with_not_finite(lambda what, name, *rest: (what, "one", *rest)), "nan.second-input.says"),
    "step-not-named": (
        with_not_finite(lambda what, name, step, *rest: (what, name, step + 1, *rest)), "nan.gradient.says",
    ),
    "tensor-not-named": (with_not_finite(lambda what, *rest: ("tensor", *rest)), "nan.weight.says"),
    "infinity-called-nan": (
        with_not_finite(lambda what, name, step, value, device: (what, name, step, float("nan"), device)),
        "infinity.input.says",
    ),
    "nan-is-left-out": (nan_is_left_out, "nan.first-input"),
    "gradients-unseen": (gradients_unseen, "nan.gradient"),
    "loads-all": (loads_all, "state.current"),
    "loads-half": (loads_half, "state.current.nothing-loaded"),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "caught"), REFUSED.values(), ids=REFUSED.keys())
def test_a_fault_of_what_is_refused(te_double: None, plant: Plant, caught: str) -> None:
    bench = new_bench(recipe="delayed")
    with Patch.context() as patch:
        plant(patch)
        with contextlib.suppress(Exception):
            check_refusals(bench, "delayed", _scope_of(bench))
    assert f"fp8.delayed.refuses.{caught}" in failed(bench)


RIGHT: dict[str, tuple[Plant, str]] = {
    "everything-refused": (everything_refused, "rows.taken"),
    "never-emptied": (never_emptied, "finite.taken"),
    "own-state-refused": (own_state_refused, "state.delayed.taken"),
    "own-state-half-loaded": (own_state_half_loaded, "state.delayed.whole"),
}


@pytest.mark.parametrize(("plant", "caught"), RIGHT.values(), ids=RIGHT.keys())
def test_what_is_right_must_not_be_refused(te_double: None, plant: Plant, caught: str) -> None:
    bench = new_bench(recipe="delayed")
    with Patch.context() as patch:
        plant(patch)
        with contextlib.suppress(layer_watch.NotDivisible):  # of what comes after it
            check_refusals(bench, "delayed", _scope_of(bench))
    assert f"fp8.delayed.refuses.{caught}" in failed(bench)


def test_a_release_that_reads_no_state_is_no_fault(te_double: None) -> None:
    """It refuses as a whole, which is what is asked."""
    bench = new_bench(recipe="delayed")
    with Patch.context() as patch:
        patch.setattr(te.linear.require(), "set_extra_state", reads_none)
        check_refusals(bench, "delayed", _scope_of(bench))
    assert failed(bench) == set()
    assert "NVTE_ALLOW" in bench.checks[-1].detail
