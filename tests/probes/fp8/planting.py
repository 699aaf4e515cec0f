"""Runs of the probes of FP8 on the double of Transformer Engine, and faults planted in it, for their tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target

RECIPES = ("delayed", "current", "block")
DOUBLE = Target("cpu", "", RECIPES, "delayed")
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def new_bench(name: str = "recipe", recipe: str = "", *, recipes: tuple[str, ...] = RECIPES, **order: Any) -> Bench:
    """A bench on the CPU, smallest shapes.

    Args:
        name: of the probe.
        recipe: that the cell is set to.
        recipes: of the target.
        order: single fields of `Order`.
    """
    given = {
        "target": Target("cpu", "", recipes, "delayed"), "requested": "te", "quick": True, "code": f"fp8.{name}",
        "stands_on": ("imports", "fp8_scope", "native_block"), "settings": {"recipe": recipe} if recipe else {},
        **order,
    }  # fmt: skip
    return Bench(Order(f"fp8_{recipe or name}", "double", **given))


def failed(bench: Bench) -> set[str]:
    """Names of the checks that failed."""
    return {check.name for check in bench.checks if not check.passed}


def module(name: str) -> Any:
    """A module of the double, which is loaded."""
    te.linear.require()
    return sys.modules[f"transformer_engine.pytorch.{name}"]


def wrapped(owner: Callable[[], Any], name: str, make: Callable[[Any], Any]) -> Plant:
    """A plant that puts make(what is there) into an attribute of an owner."""
    return lambda patch: patch.setattr(owner(), name, make(getattr(owner(), name)))


def delayed_state() -> Any:
    """The class of the double's amax histories and scales in one direction."""
    return module("scaling").DelayedState


def after_update(change: Callable[[Any, Any, Any], object]) -> Plant:
    """A plant that does something to a state after each update: change(state, history before, scale before)."""

    def make(plain: Callable[[Any], None]) -> Callable[[Any], None]:
        def update(self: Any) -> None:
            history, scale = self.amax_history.clone(), self.scale.clone()
            plain(self)
            change(self, history, scale)

        return update

    return wrapped(delayed_state, "update", make)


never_rolls = after_update(lambda state, history, _: state.amax_history.copy_(history))


def kernel_update(self: Any) -> None:
    """As the kernel that releases ship: a column that saw nothing stays as it is."""
    newest = self.amax_history[0].clone()
    top = torch.where(newest > 0, self.amax_history.amax(dim=0), 0.0)
    moved = self.amax_history.roll(-1, 0)
    moved[0] = 0.0
    self.amax_history.copy_(torch.where(newest > 0, moved, self.amax_history))
    self.scale.copy_(torch.where(top > 0, torch.full_like(top, self.top).div(top), self.scale))


def plant_kernel(patch: Patch) -> None:
    """Let the double bring its states up to date as that kernel does."""
    patch.setattr(delayed_state(), "update", kernel_update)
