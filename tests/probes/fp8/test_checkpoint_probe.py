"""The probe of recomputation: what is right passes; a checkpoint that changes something, or a wrong owner, is told."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from megacpp_validate.bridge import fp8_scope, layer_watch, te_fp8
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.errors import ScopeEnteredTwice
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8 import checkpoint as probe
from megacpp_validate.probes.fp8.stacks import scope_of
from tests.probes.fp8.planting import failed, new_bench

pytestmark = pytest.mark.usefixtures("te_double")
Patch = pytest.MonkeyPatch
WAYS = ("reentrant", "not-reentrant")


def blocks(recipe: str, order: Any = "in turn", kind: Any = "plain") -> Bench:
    bench = new_bench("checkpoint")
    enter = nullcontext if recipe == "bf16" else scope_of(bench, recipe)
    probe._check_blocks(bench, enter, delayed=recipe == "delayed", order=order, kind=kind)
    return bench


def owner(recipe: str = "delayed") -> Bench:
    bench = new_bench("checkpoint", recipes=(recipe,))
    probe._check_owner(bench, scope_of(bench, recipe), delayed=recipe == "delayed")
    return bench


def high(recipe: str = "delayed") -> Bench:
    bench = new_bench("checkpoint", recipes=(recipe,))
    probe._check_high_precision(bench, scope_of(bench, recipe))
    return bench


def test_it_passes_in_every_recipe() -> None:
    bench = new_bench("checkpoint")
    probe.probe(bench)
    assert failed(bench) == set()
    names = {check.name for check in bench.checks}
    for way in WAYS:
        assert {f"blocks.delayed.{order}.{way}.amax-once" for order in ("in-turn", "late")} <= names
        assert {f"blocks.{kind}.in-turn.{way}.grad" for kind in ("bf16", "delayed", "current", "block")} <= names
        assert {f"owner.block.torch.{way}", f"owner.current.torch.{way}.scope-inside"} <= names
        assert {f"high-precision.{recipe}.{way}" for recipe in ("delayed", "current", "block")} <= names
        assert f"layer_watch.fp8.delayed.{way}.history" in names


def test_scales_of_the_next_step_are_caught(monkeypatch: Patch) -> None:
    """Planted: the second pass rounds as a third one would, and takes in each amax again."""
    monkeypatch.setattr(te.fp8_state_manager.require(), "get_old_fp8_meta_tensors_for_recompute", lambda _: None)
    wanted = {f"{way}.{what}" for way in WAYS for what in ("grad", "amax-once")}
    assert wanted <= failed(blocks("delayed"))


def test_scales_in_the_wrong_turn_are_caught(monkeypatch: Patch) -> None:
    """Planted: the last pass's scales are taken first; only a pipeline, with several passes under way, shows it."""
    monkeypatch.setattr(
        te.fp8_state_manager.require(), "get_old_fp8_meta_tensors_for_recompute", lambda meta: meta["kept_scales"].pop()
    )
    assert failed(blocks("delayed")) == set()
    assert {f"{way}.grad" for way in WAYS} <= failed(blocks("delayed", "late"))


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_a_second_pass_in_high_precision_is_caught(monkeypatch: Patch, recipe: str) -> None:
    module = __import__("transformer_engine.pytorch.distributed", fromlist=["autocast"])
    real = module.autocast
    monkeypatch.setattr(module, "autocast", lambda **given: real(**{**given, "enabled": False}))
    assert {f"{way}.grad" for way in WAYS} <= failed(blocks(recipe))


def test_an_amax_that_is_lost_is_caught(monkeypatch: Patch) -> None:
    """Planted: what was seen in a first pass that will be run again is not noted."""
    from transformer_engine.pytorch.scaling import DelayedState

    manager = te.fp8_state_manager.require()
    real = DelayedState.round

    def rounded(self: Any, tensor: Any, index: int) -> Any:
        out = real(self, tensor, index)
        if manager.phase == "forward":
            self.amax_history[0, index] = 0.0
        return out

    monkeypatch.setattr(DelayedState, "round", rounded)
    assert {f"{way}.amax-once" for way in WAYS} <= failed(blocks("delayed"))


def test_layers_that_never_give_the_same_twice_are_told(monkeypatch: Patch) -> None:
    layer, count = te.linear.require(), itertools.count()
    real = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda self, *given, **more: real(self, *given, **more) * (1 + next(count) % 7)
    )
    assert "steady" in failed(blocks("current"))
    assert {f"{way}.grad" for way in WAYS} <= failed(blocks("current", kind="attention"))  # nothing is left to judge


def test_what_attention_sums_in_another_order_is_not_judged(monkeypatch: Patch) -> None:
    """Planted: one gradient is never the same twice."""
    from transformer_engine.pytorch.linear import _Linear

    real, count = _Linear.backward, itertools.count()

    def backward(ctx: Any, gradient: Any) -> Any:
        to_rows, to_weight, *rest = real(ctx, gradient)
        return to_rows, to_weight * (1 + next(count) % 7), *rest

    monkeypatch.setattr(_Linear, "backward", staticmethod(backward))
    bench = blocks("current", kind="attention")
    assert failed(bench) == set()
    assert any("not steady by themselves: 0.block" in check.detail for check in bench.checks)


def test_an_output_that_a_checkpoint_changes_is_caught(monkeypatch: Patch) -> None:
    real = te_fp8.te_recompute
    monkeypatch.setattr(layer_watch, "te_recompute", lambda call, rows, **more: real(call, rows * 1.01, **more))
    assert {f"{way}.{what}" for way in WAYS for what in ("forward", "grad")} <= failed(blocks("block"))


def test_other_random_numbers_in_the_second_pass_are_caught(monkeypatch: Patch) -> None:
    module = __import__("transformer_engine.pytorch.distributed", fromlist=["x"])
    monkeypatch.setattr(module, "_drawing", lambda _: nullcontext())
    assert {f"{way}.grad" for way in WAYS} <= failed(blocks("bf16"))


def test_a_checkpoint_that_keeps_everything_is_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(layer_watch, "te_recompute", lambda call, rows, **_: call(rows))
    assert failed(blocks("current")) == {f"{way}.run-again" for way in WAYS}


def test_a_bridge_that_lets_torch_s_checkpoint_in_is_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(layer_watch, "refuse_torch_recompute", lambda _: None)
    assert failed(owner()) == {f"torch.{way}" for way in WAYS}


def test_a_bridge_that_lets_a_scope_in_is_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fp8_scope, "refuse_scope_in_recompute", lambda _: None)
    wanted = {f"{whose}.{way}.scope-inside" for whose in ("torch", "te") for way in WAYS}
    assert failed(owner()) & wanted == wanted


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_what_torch_makes_of_it_is_the_reason(recipe: str) -> None:
    said = {check.name: check.detail for check in owner(recipe).checks}
    assert said["torch.reentrant.reason"].startswith("no error, other gradients")
    assert said["torch.not-reentrant.reason"].startswith("CheckpointError")


def test_without_a_reason_the_refusal_is_told_to_be_needless(monkeypatch: Patch) -> None:
    """Planted: torch's checkpoint is as good as the vendor's."""
    monkeypatch.setattr(probe, "torch_checkpoint", fp8_scope.te_recompute)
    bench = new_bench("checkpoint", recipes=("current",))
    call = partial(fp8_scope.te_recompute, use_reentrant=True)
    assert probe._what_torch_makes_of_it(bench, scope_of(bench, "current"), call, delayed=False) == ""
    assert {f"torch.{way}.reason" for way in WAYS} <= failed(owner("current"))


def test_a_refused_pass_leaves_no_note_behind(monkeypatch: Patch) -> None:
    """As Transformer Engine has it: a note a first pass, taken in turn by the second ones."""
    kind: Any = type("activation_recompute_forward", (), {"_is_first_fp8_module": [True]})
    monkeypatch.setattr(
        __import__("transformer_engine.pytorch.distributed", fromlist=["x"]), "activation_recompute_forward", kind
    )
    with probe._flags_kept():
        kind._is_first_fp8_module.append(False)
    assert kind._is_first_fp8_module == [True]


def order() -> Bench:
    bench = new_bench("checkpoint", recipes=("delayed",))
    probe._check_order(bench, scope_of(bench, "delayed"))
    return bench


def test_a_bridge_that_minds_no_order_is_caught(monkeypatch: Patch) -> None:
    assert failed(order()) == set()
    monkeypatch.setattr(layer_watch._Passes, "_take", lambda *_: None)
    assert failed(order()) == {f"{way}.{what}" for way in WAYS for what in ("one-backward-for-two", "never-run-again")}


def test_scales_that_find_their_own_pass_need_no_order(monkeypatch: Patch) -> None:
    """Planted: a release that gives each second pass the right scales, so that nothing is left to refuse."""
    manager = te.fp8_state_manager.require()
    monkeypatch.setattr(
        manager, "get_old_fp8_meta_tensors_for_recompute", lambda meta: meta["kept_scales"].pop().clone()
    )
    assert {f"{way}.reason" for way in WAYS} <= failed(order())


def test_high_precision_that_is_refused_in_the_second_pass_is_caught(monkeypatch: Patch) -> None:
    manager = te.fp8_state_manager.require()
    real = fp8_scope.high_precision

    def refused(because: str) -> Any:
        if manager.phase == "recompute":
            raise ScopeEnteredTwice("beside the scope of another thread")
        return real(because)

    monkeypatch.setattr(fp8_scope, "high_precision", refused)
    bench = high()
    assert failed(bench) == set(WAYS)
    assert all("ScopeEnteredTwice" in check.detail for check in bench.checks)


def test_high_precision_that_is_low_in_the_second_pass_is_caught(monkeypatch: Patch) -> None:
    manager = te.fp8_state_manager.require()
    real = fp8_scope.high_precision
    monkeypatch.setattr(
        fp8_scope, "high_precision", lambda because: nullcontext() if manager.phase == "recompute" else real(because)
    )
    assert "reentrant" in failed(high("current"))
