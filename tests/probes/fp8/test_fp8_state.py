"""The state of delayed scaling: what is right passes, and each fault planted in it is caught in its phase."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope
from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8.state import check_delayed_state, check_shares, check_shares_of_a_cast, default_update
from megacpp_validate.probes.references.delayed_scaling import DelayedRule, DelayedTensors, new_state, next_state
from tests.probes.fp8.planting import (
    DOUBLE,
    Patch,
    Plant,
    after_update,
    delayed_state,
    failed,
    never_rolls,
    new_bench,
    wrapped,
)

PHASES = ["first", "normal", "spike", "after-spike", "zero", "after-zero", "accumulated", "accumulated-late"]


def new_layer(width: int, out: int) -> Any:
    return te.linear.require()(width, out, bias=True, params_dtype=torch.bfloat16, device="cpu")


def enter(**recipe: Any) -> Callable[[], Any]:
    made = te.delayed_scaling.require()(**{"amax_history_len": 16, **recipe})
    return lambda: te.autocast.require()(enabled=True, recipe=made)


def state_checks(seed: int = 0, recipe: dict[str, Any] | None = None, **expected: Any) -> Bench:
    bench = new_bench(seed=seed)
    torch.manual_seed(seed)
    check_delayed_state(bench, new_layer(32, 48), enter(**(recipe or {})), **expected)
    return bench


def share_checks(seed: int = 0, recipe: dict[str, Any] | None = None) -> Bench:
    bench = new_bench(seed=seed)
    check_shares(bench, lambda: new_layer(128, 128), enter(**(recipe or {})))
    return bench


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"amax_history_len": 4},
        {"amax_history_len": 1},
    ],
)
def test_the_state_is_as_re_computed(te_double: None, recipe: dict[str, Any]) -> None:
    bench = state_checks(recipe=recipe, length=recipe.get("amax_history_len", 16))
    assert failed(bench) == set()
    wanted = {
        f"state.{p}.{t}.{w}" for p in PHASES for t in ("input", "weight", "gradient") for w in ("history", "scale")
    }
    assert {check.name for check in bench.checks} == wanted | {"state.length", "state.others"}


def test_through_the_bridge_s_own_scope(te_double: None) -> None:
    bench = new_bench()
    layer = new_layer(32, 32)
    weight = layer.weight.detach().clone()
    check_delayed_state(
        bench, layer, lambda: fp8_scope.low_precision(target=DOUBLE.id, amax_reduction_group=None, recipe="delayed")
    )
    assert failed(bench) == set()
    assert torch.equal(layer.weight, weight)


frozen = after_update(lambda state, *_: state.scale.fill_(1.0))
power_of_two = after_update(lambda state, *_: state.scale.copy_(state.scale.log2().floor().exp2()))
zero_resets = after_update(
    lambda state, history, _: state.scale.copy_(torch.where(history.amax(dim=0) == 0, 1.0, state.scale))
)


def oldest_does_not_count(patch: Patch) -> None:
    update = delayed_state().update

    def changed(self: Any) -> None:
        if len(self.amax_history) > 1:
            self.amax_history[1].zero_()
        update(self)

    patch.setattr(delayed_state(), "update", changed)


def most_recent(patch: Patch) -> None:
    update = delayed_state().update

    def changed(self: Any) -> None:
        self.recipe = te.delayed_scaling.require()(amax_history_len=16, amax_compute_algo="most_recent")
        update(self)

    patch.setattr(delayed_state(), "update", changed)


def rounded(change: Callable[[Any, Any, int, Any], Any]) -> Plant:
    """What comes out of a cast, and what it leaves in the state: change(state, tensor, column, rounded)."""
    return wrapped(
        delayed_state, "round",
        lambda plain: lambda self, tensor, index: change(self, tensor, index, plain(self, tensor, index)),
    )  # fmt: skip


def amax_of_another_tensor(state: Any, _: Any, index: int, out: Any) -> Any:
    """The weight's amax goes into the column of the output."""
    if index == 1:
        state.amax_history[0, 2] = state.amax_history[0, 1]
    return out


def amax_after_the_cast(state: Any, tensor: Any, index: int, out: Any) -> Any:
    """The amax of what was kept, which saturates: a spike is never seen."""
    if tensor.numel():
        state.amax_history[0, index] = out.abs().amax()
    return out


def amax_swapped(patch: Patch) -> None:
    """Input and weight take each other's column."""
    plain = delayed_state().round
    swap = {0: 1, 1: 0}

    def changed(self: Any, tensor: Any, index: int) -> Any:
        both = self.amax_history.shape[1] > 2
        return plain(self, tensor, swap.get(index, index) if both else index)

    patch.setattr(delayed_state(), "round", changed)


def backward_once_a_step(patch: Patch) -> None:
    """Only the first of several backward passes counts."""
    manager = te.fp8_state_manager.require()
    plain = manager.reduce_and_update_fp8_tensors
    last = [False]

    def changed(*, forward: bool) -> None:
        if forward or last[0]:
            plain(forward=forward)
        last[0] = forward

    patch.setattr(manager, "reduce_and_update_fp8_tensors", changed)


STATE: dict[str, tuple[Plant, str, str]] = {
    "never-rolls": (never_rolls, "state.normal.input.history", ""),
    "frozen": (frozen, "state.first.gradient.scale", "history"),
    "margin-off-by-one": (
        after_update(lambda state, *_: state.scale.div_(2.0)),
        "state.normal.weight.scale",
        "history",
    ),
    "zero-resets": (zero_resets, "state.zero.input.scale", "state.after-spike."),
    "a-bit-off": (
        after_update(lambda state, *_: state.scale.mul_(1.0 + 2.0**-21)),
        "state.normal.input.scale",
        "history",
    ),
    "power-of-two": (power_of_two, "state.normal.input.scale", "history"),
    "row-is-not-emptied": (
        after_update(lambda state, history, _: state.amax_history[0].copy_(history[0])),
        "state.first.input.history",
        "scale",
    ),
    "oldest-does-not-count": (oldest_does_not_count, "state.after-spike.gradient.scale", "history"),
    "most-recent": (most_recent, "state.after-spike.input.scale", "history"),
    "amax-of-another-tensor": (rounded(amax_of_another_tensor), "state.others", "input"),
    "amax-swapped": (amax_swapped, "state.spike.weight.history", "gradient"),
    "amax-after-the-cast": (rounded(amax_after_the_cast), "state.spike.input.history", ""),
    "backward-once-a-step": (backward_once_a_step, "state.accumulated-late.gradient.history", "state.accumulated."),
}


@pytest.mark.parametrize(("plant", "caught", "not_caught"), STATE.values(), ids=STATE.keys())
def test_a_fault_of_the_state(te_double: None, plant: Plant, caught: str, not_caught: str) -> None:
    with Patch.context() as patch:
        plant(patch)
        red = failed(state_checks())
    assert caught in red
    assert not not_caught or not [name for name in red if not_caught in name]


def test_another_length_is_told(te_double: None) -> None:
    red = failed(state_checks(recipe={"amax_history_len": 8}))
    assert red == {"state.length"}


def test_the_kernel_leaves_the_history_alone_where_nothing_was_seen(te_double: None) -> None:
    """The double moves it on, as the Python update does: held to the kernel, the zero steps are told and no others."""
    red = failed(state_checks(update="fused"))
    assert red
    assert all(name.startswith("state.zero.") for name in red)


def kernel_update(self: Any) -> None:
    """The loop of Transformer Engine's kernel, a column after the other, as its source writes it."""
    length, tensors = self.amax_history.shape
    for column in range(tensors):
        history = self.amax_history[:, column].tolist()
        newest, amax = history[0], 0.0
        if newest != 0.0:
            for row in range(length):
                value = history[row + 1] if row < length - 1 else newest
                amax = max(amax, value)
                self.amax_history[row, column] = value if row > 0 else 0.0
        if math.isfinite(amax) and amax > 0.0:
            self.scale[column] = torch.tensor([self.top]).div(torch.tensor([amax]))[0]


def test_the_kernel_s_own_loop_is_as_re_computed(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_state(), "update", kernel_update)
    assert failed(state_checks(update="fused")) == set()
    red = failed(state_checks(update="python"))
    assert red
    assert all(name.startswith("state.zero.") for name in red)


def test_which_update_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_UNFUSED_FP8_UPDATE", raising=False)
    assert (default_update("cuda"), default_update("cpu")) == ("fused", "python")
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    assert default_update("cuda") == "python"


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_those_of_the_distribution(te_double: None, seed: int) -> None:
    bench = share_checks(seed)
    assert failed(bench) == set()
    assert len(bench.checks) == 18
    shares = {check.name: check.parts[0].observed or 0.0 for check in bench.checks}
    assert shares["shares.spike.input.overflowed"] > 0.1
    assert shares["shares.shrunk.gradient.underflowed"] > 0.01
    assert shares["shares.steady.input.overflowed"] < 0.001


def current_scale(patch: Patch) -> None:
    """Each cast uses the scale of its own amax."""
    plain = delayed_state().round

    def changed(self: Any, tensor: Any, index: int) -> Any:
        self.scale[index] = self.top / tensor.detach().float().abs().amax()
        return plain(self, tensor, index)

    patch.setattr(delayed_state(), "round", changed)


SHARES: dict[str, tuple[Plant, str]] = {
    "frozen": (frozen, "shares.steady.input.underflowed"),
    "frozen-gradient": (frozen, "shares.steady.gradient.underflowed"),
    "current-scale": (current_scale, "shares.spike.input.overflowed"),
    "spike-forgotten": (most_recent, "shares.shrunk.gradient.underflowed"),
    "four-times": (after_update(lambda state, *_: state.scale.mul_(4.0)), "shares.steady.input.overflowed"),
    "weight-frozen": (frozen, "shares.steady.weight.underflowed"),
    "weight-spike-forgotten": (most_recent, "shares.shrunk.weight.underflowed"),
    "not-cast-at-all": (rounded(lambda state, tensor, index, out: tensor.float()), "shares.shrunk.input.underflowed"),
}


@pytest.mark.parametrize(("plant", "caught"), SHARES.values(), ids=SHARES.keys())
def test_a_fault_of_the_shares(te_double: None, plant: Plant, caught: str) -> None:
    with Patch.context() as patch:
        plant(patch)
        assert caught in failed(share_checks())


def without_a_number(width: int, out: int) -> Any:
    layer = new_layer(width, out)
    plain = layer.forward
    layer.forward = lambda rows: plain(rows) * float("nan")
    return layer


def test_what_does_not_come_out_is_told(te_double: None) -> None:
    bench = new_bench()
    check_shares(bench, lambda: without_a_number(32, 32), contextlib.nullcontext)
    assert failed(bench)
    with pytest.raises(ValueError, match="Next step"):
        check_shares(bench, lambda: new_layer(32, 48), contextlib.nullcontext)
    with pytest.raises(ValueError, match="wider than 128"):
        check_shares_of_a_cast(bench, lambda: new_layer(128, 128), contextlib.nullcontext, "block")


@pytest.mark.parametrize(
    ("rule", "amax", "scale"),
    [
        (DelayedRule(448.0), 1.0, 224.0),  # 2 is still in the history
        (DelayedRule(448.0), 0.0, 5.0),  # the kernel does not look at the history then
        (DelayedRule(448.0, update="python"), 0.0, 224.0),
        (DelayedRule(448.0), float("inf"), 5.0),
        (DelayedRule(448.0), float("nan"), 224.0),
        (DelayedRule(448.0, update="python"), float("nan"), 5.0),
    ],
)
def test_one_call_re_computed(rule: DelayedRule, amax: float, scale: float) -> None:
    before = DelayedTensors(torch.tensor([[0.0], [2.0], [0.5]]).double(), torch.tensor([5.0]).double())
    after = next_state(before, torch.tensor([amax]).double(), rule)
    assert float(after.scale[0]) == float(torch.tensor(scale))
    if amax == 0.0 and rule.update == "fused":
        assert torch.equal(after.history, before.history)
    else:
        assert after.history[:2, 0].tolist() == [0.0, 0.5]
        assert after.history[2, 0].item() == pytest.approx(amax, nan_ok=True)
    with pytest.raises(ValueError, match="Next step"):
        new_state(0, 1)
