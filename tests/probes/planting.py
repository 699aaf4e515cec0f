"""Probes that run on the double of Transformer Engine or on plain PyTorch, and faults planted under them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.observe import marking_vendor_layers
from megacpp_validate.probes.order import Order, Target

RECIPES = ("delayed", "current", "block")
DOUBLE = Target("cpu", "", RECIPES, "delayed")
Fault = Callable[..., Any]
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], object]


def new_bench(probe: str, requested: str = "native", recipes: tuple[str, ...] = (), **more: Any) -> Bench:
    """A bench on the CPU, of the smallest shapes unless `quick` is False; `arch`, `attention`, ... are the target's."""
    names = ("arch", "attention", "deep_gemm", "production_recipe")
    of_target = {name: more.pop(name) for name in names if name in more}
    target = Target("cpu", of_target.pop("arch", ""), recipes, **of_target)
    return Bench(Order(probe, "stack", target, requested, **{"quick": True, **more}))


def fp8_bench(name: str, recipe: str = "", recipes: tuple[str, ...] = RECIPES, **order: Any) -> Bench:
    """A bench of a cell of FP8 on the double, smallest shapes; `recipe` is what the cell is set to."""
    given = {
        "target": Target("cpu", "", recipes, "delayed"), "requested": "te", "quick": True, "code": f"fp8.{name}",
        "stands_on": ("imports", "fp8_scope", "native_block"), "settings": {"recipe": recipe} if recipe else {},
        **order,
    }  # fmt: skip
    return Bench(Order(f"fp8_{recipe or name}", "double", **given))


def run_probe(module: Any, requested: str = "native", recipes: tuple[str, ...] = (), **more: Any) -> Bench:
    """A bench on which a probe ran, and what it keeps for the end."""
    bench = new_bench(module.__name__.rpartition(".")[2], requested, recipes, **more)
    with marking_vendor_layers():
        module.probe(bench)
        if hasattr(module, "probe_last"):
            module.probe_last(bench)
    return bench


def failed(bench: Bench) -> set[str]:
    """Names of the checks that failed."""
    return {check.name for check in bench.checks if not check.passed}


def check_caught(bench: Bench, probe: Callable[[Bench], object], plant: Plant, wanted: Iterable[str]) -> set[str]:
    """Each pattern of names must fail, where a probe runs over a fault; what the fault breaks after it is no matter."""
    with Patch.context() as patch:
        plant(patch)
        with contextlib.suppress(Exception), marking_vendor_layers():
            probe(bench)
    found = failed(bench)
    missing = [name for name in wanted if not any(fnmatch(one, name) for one in found)]
    assert not missing, sorted(found)
    return found


# --- plants ---------------------------------------------------------------------------------------------------------


def putting(owner: Any, name: str, value: Any) -> Plant:
    """A plant that puts a value into an attribute."""
    return lambda patch: patch.setattr(owner, name, value)


def changing(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """A plant that puts make(what is there) into an attribute; of an owner that has to be loaded, its getter."""

    def plant(patch: Patch) -> None:
        held = owner() if callable(owner) and not isinstance(owner, type) else owner
        patch.setattr(held, name, make(getattr(held, name)))

    return plant


def after(owner: Any, name: str, fault: Fault) -> Plant:
    """A plant that does something to what a function gives."""
    return changing(owner, name, lambda whole: lambda *given, **more: fault(whole(*given, **more)))


def module(name: str) -> Any:
    """A module of the double, which is loaded."""
    te.linear.require()
    return sys.modules[f"transformer_engine.pytorch.{name}"]


def delayed_state() -> Any:
    """The class of the double's amax histories and scales in one direction."""
    return module("scaling").DelayedState


def after_update(change: Callable[[Any, Any], object]) -> Plant:
    """A plant that does something to a state after each update: change(state, history before)."""

    def make(plain: Callable[[Any], None]) -> Callable[[Any], None]:
        def update(self: Any) -> None:
            history = self.amax_history.clone()
            plain(self)
            change(self, history)

        return update

    return changing(delayed_state, "update", make)


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


# --- faults of numbers ------------------------------------------------------------------------------------------------


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, fault: Fault) -> Any:
        ctx.fault = fault
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return ctx.fault(gradient), None


def in_gradient(fault: Fault) -> Fault:
    """The tensor as it is, with something done to its gradient."""
    return lambda tensor: _Gradient.apply(tensor, fault)
