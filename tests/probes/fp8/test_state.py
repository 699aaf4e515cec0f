"""Delayed scaling beside its re-computation: the double passes, and each planted fault fails the check meant for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.emulation import DelayedTensors, next_state
from megacpp_validate.probes.fp8.state import check_delayed_state, check_scopes, default_update
from tests.probes.planting import (
    Patch,
    Plant,
    after_update,
    changing,
    check_caught,
    delayed_state,
    failed,
    fp8_bench,
    module,
    plant_kernel,
)

PHASES = ["first", "normal", "spike", "after-spike", "zero", "after-zero", "accumulated", "accumulated-late"]


def state(bench: Bench, update: Any = "python") -> None:
    check_delayed_state(bench, bench.te_layer("linear", 32, 48), bench.low_precision("delayed"), update=update)


def scopes(bench: Bench, update: Any = "python") -> None:
    check_scopes(bench, bench.low_precision("delayed"), update=update, name="scopes")


@pytest.mark.parametrize("judge", [state, scopes])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_right_passes(te_double: None, judge: Callable[[Bench], None], seed: int, monkeypatch: Patch) -> None:
    bench = fp8_bench("recipe", seed=seed)
    judge(bench)
    assert failed(bench) == set()
    if judge is state:
        tensors = ("input", "weight", "gradient")
        wanted = {f"state.{p}.{t}.{w}" for p in PHASES for t in tensors for w in ("history", "scale")}
        assert {check.name for check in bench.checks} == wanted | {"state.length", "state.others"}
    plant_kernel(monkeypatch)
    judge(again := fp8_bench("recipe"), "fused")  # type: ignore[call-arg]
    assert failed(again) == set()
    judge(told := fp8_bench("recipe"), "python")  # type: ignore[call-arg]
    assert judge is scopes or {name.split(".")[1] for name in failed(told)} == {"zero"}


# --- one layer --------------------------------------------------------------------------------------------------------


def manager_of() -> Any:
    return te.fp8_state_manager.require()


def oldest_does_not_count(plain: Any) -> Any:
    return lambda self: (self.amax_history[1].zero_(), plain(self))


def rounding(change: Callable[[Any, Any, int, Any], Any]) -> Plant:
    """What comes out of a cast, and what it leaves in the state: change(state, tensor, column, rounded)."""
    make = lambda plain: lambda self, tensor, index: change(self, tensor, index, plain(self, tensor, index))  # noqa: E731
    return changing(delayed_state, "round", make)


def amax_of_another_tensor(state: Any, _: Any, index: int, out: Any) -> Any:
    """The weight's amax goes into the column of the output."""
    if index == 1:
        state.amax_history[0, 2] = state.amax_history[0, 1]
    return out


def all_updates(change: Callable[..., None]) -> Plant:
    """change(plain, forward) in place of an update of all states."""
    make = lambda plain: lambda *, forward=True: change(plain, forward)  # noqa: E731
    return changing(manager_of, "reduce_and_update_fp8_tensors", make)


def once_for_several() -> Plant:
    last = [False]

    def change(plain: Any, forward: bool) -> None:
        if forward or last[0]:
            plain(forward=forward)
        last[0] = forward

    return all_updates(change)


STATE: dict[str, tuple[Plant, str, str]] = {
    "never rolls": (after_update(lambda state, history: state.amax_history.copy_(history)), "normal.input.history", ""),
    "a bit off": (after_update(lambda state, _: state.scale.mul_(1.0 + 2.0**-21)), "normal.input.scale", "history"),
    "zero resets": (
        after_update(lambda s, history: s.scale.copy_(torch.where(history.amax(dim=0) == 0, 1.0, s.scale))),
        "zero.input.scale", "after-spike.",
    ),
    "oldest does not count": (
        changing(delayed_state, "update", oldest_does_not_count), "after-spike.gradient.scale", "history",
    ),
    "amax of another tensor": (rounding(amax_of_another_tensor), "others", "input"),
    "backward once a step": (once_for_several(), "accumulated-late.gradient.history", "state.accumulated."),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "caught", "not_caught"), STATE.values(), ids=STATE)
def test_a_fault_of_one_layer(te_double: None, plant: Plant, caught: str, not_caught: str) -> None:
    red = check_caught(fp8_bench("recipe"), state, plant, {f"state.{caught}"})
    assert not not_caught or not [name for name in red if not_caught in name]


def test_which_update_is_expected(monkeypatch: Patch) -> None:
    monkeypatch.delenv("NVTE_UNFUSED_FP8_UPDATE", raising=False)
    assert (default_update("cuda"), default_update("cpu")) == ("fused", "python")
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    assert default_update("cuda") == "python"


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (1.0, 224.0),  # 2 is still in the history
        (0.0, 5.0),  # the kernel does not look at the history then
        (float("inf"), 5.0),
        (float("nan"), 224.0),
    ],
)
def test_one_call_of_the_kernel_re_computed(amax: float, scale: float) -> None:
    """`test_delayed_reference.py` has the update in Python."""
    before = DelayedTensors(torch.tensor([[0.0], [2.0], [0.5]]).double(), torch.tensor([5.0]).double())
    after = next_state(before, torch.tensor([amax]).double(), 448.0, "fused")
    assert float(after.scale[0]) == float(torch.tensor(scale))
    if amax == 0.0:
        assert torch.equal(after.history, before.history)
    else:
        assert after.history[:2, 0].tolist() == [0.0, 0.5]
        assert after.history[2, 0].item() == pytest.approx(amax, nan_ok=True)


# --- several layers ---------------------------------------------------------------------------------------------------


def no_first(patch: Patch) -> None:
    """No module says that it is the first of its scope."""
    patch.setattr(manager_of(), "is_first_fp8_module", lambda: False)


def other_quantizer(where: Callable[..., int]) -> Plant:
    """Operand `role` of product `gemm` of a layer with `count` products is cast as that of where(role, gemm, count)."""

    def make(plain: Any) -> Any:
        def changed(self: Any, tensor: Any, role: str, gemm: int) -> Any:
            count = len(self.forward.scale) // 3 if self.forward is not None else 1
            return plain(self, tensor, role, where(role, gemm, count))

        return changed

    def plant(patch: Patch) -> None:
        for name in ("_round", "cast"):
            changing(lambda: module("layer").Rounder, name, make)(patch)

    return plant


def shared(role: str, count: int) -> Plant:
    return other_quantizer(lambda seen, gemm, of: 0 if (seen, of) == (role, count) else gemm)


def swapped(role: str, count: int) -> Plant:
    return other_quantizer(lambda seen, gemm, of: (gemm + 1) % of if (seen, of) == (role, count) else gemm)


def saved_operand_loses_its_scale(plain: Any) -> Any:
    """What the backward pass multiplies again is read with a scale of its own."""

    def product(recipe: Any, name: str, first: Any, second: Any) -> Any:
        if name == "wgrad":
            first = first[0], module("quantized").Cast(first[1].quantizer, torch.ones(1)), first[2]
        return plain(recipe, name, first, second)

    return product


def bare(plain: Any) -> Any:
    def operand(values: Any, cast: Any) -> Any:
        storage = plain(values, cast)
        storage._scale_inv = torch.ones(2)
        return storage

    return operand


SCOPES: dict[str, tuple[Plant, str]] = {
    "no module is the first": (no_first, "updates.backward"),
    "one backward update for two scopes": (once_for_several(), "mlp.gradient.history"),
    "mlp swaps its gradients": (swapped("grad", 2), "mlp.gradient.scale"),
    "experts share their input": (shared("input", 3), "experts.input.amax"),
    "saved operand loses its scale": (
        changing(partial(module, "gemm"), "_product", saved_operand_loses_its_scale), "norm-linear.input.kept",
    ),
    "products not seen": (changing(partial(module, "gemm"), "operand", bare), "products"),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "caught"), SCOPES.values(), ids=SCOPES)
def test_a_fault_of_several_layers(te_double: None, plant: Plant, caught: str) -> None:
    check_caught(fp8_bench("recipe"), scopes, plant, {f"scopes.{caught}"})
