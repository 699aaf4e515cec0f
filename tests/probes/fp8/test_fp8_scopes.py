"""Several layers in a scope, and a run that is resumed: what is right passes, and each planted fault is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope
from megacpp_validate.bridge import imports as te
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8.quantizers import check_operands, watching_operands
from megacpp_validate.probes.fp8.scopes import check_resumed, check_scopes
from tests.probes.fp8.planting import DOUBLE, Patch, Plant, failed, module, new_bench, plant_kernel, wrapped


def enter() -> Any:
    return fp8_scope.low_precision(target=DOUBLE.id, amax_reduction_group=fp8_scope.SINGLE_OWNER, recipe="delayed")


def scopes(update: Any = "python", seed: int = 0) -> Bench:
    bench = new_bench(seed=seed)
    check_scopes(bench, enter, update=update, name="scopes")
    return bench


def resumed(seed: int = 0) -> Bench:
    bench = new_bench(seed=seed)
    check_resumed(bench, enter, name="resumed")
    return bench


@pytest.mark.parametrize("seed", range(2))
def test_what_is_right_passes(te_double: None, seed: int, monkeypatch: Patch) -> None:
    bench = scopes(seed=seed)
    assert failed(bench) == set(), [c for c in bench.checks if not c.passed]
    assert len(bench.checks) == 3 + 4 * (3 * 3 + 2 + 1)
    assert failed(resumed(seed)) == set()
    plant_kernel(monkeypatch)
    assert failed(scopes("fused", seed)) == set()


def test_nothing_that_was_watched_stays_wrapped(te_double: None) -> None:
    manager = te.fp8_state_manager.require()
    plain = vars(manager)["reduce_and_update_fp8_tensors"]
    scopes()
    assert vars(manager)["reduce_and_update_fp8_tensors"] is plain


# --- who brings the state up to date, and when ------------------------------------------------------------------------


def manager_of() -> Any:
    return te.fp8_state_manager.require()


def changed_update(change: Callable[..., None]) -> Plant:
    """change(plain, forward) in place of an update of all states."""
    return wrapped(
        manager_of, "reduce_and_update_fp8_tensors", lambda plain: lambda *, forward=True: change(plain, forward)
    )


def first_is(answer: bool) -> Plant:
    """Every module says that it is the first of its scope, or none does."""
    return lambda patch: patch.setattr(manager_of(), "is_first_fp8_module", lambda: answer)


def twice_forward(plain: Any, forward: bool) -> None:
    for _ in range(1 + forward):
        plain(forward=forward)


def once_for_several_scopes() -> Plant:
    last: list[bool] = [False]

    def change(plain: Any, forward: bool) -> None:
        if forward or last[0]:
            plain(forward=forward)
        last[0] = forward

    return changed_update(change)


def only_the_first_state(plain: Any, forward: bool) -> None:
    states = manager_of().states
    kept = list(states)
    first = next(index for index, state in enumerate(kept) if state[0] is forward)
    states[:] = [state for index, state in enumerate(kept) if state[0] is not forward or index == first]
    plain(forward=forward)
    states[:] = kept


def one_amax_wins(of_first: bool) -> Plant:
    """Of a layer that is called twice, only the first call's amax is taken in, or only the last one's."""

    def plant(patch: Patch) -> None:
        plain = module("scaling").DelayedState.round

        def changed(self: Any, tensor: Any, index: int) -> Any:
            kept = self.amax_history[0, index].clone()
            self.amax_history[0, index] = 0.0
            rounded = plain(self, tensor, index)
            if of_first and kept > 0:
                self.amax_history[0, index] = kept
            return rounded

        patch.setattr(module("scaling").DelayedState, "round", changed)

    return plant


# --- whose quantizer casts what ---------------------------------------------------------------------------------------


def other_quantizer(where: Callable[..., int]) -> Plant:
    """Operand `role` of product `gemm` of a layer with `count` products is cast as that of where(role, gemm, count)."""

    def plant(patch: Patch) -> None:
        kind = module("layer").Rounder
        for name in ("_round", "cast"):
            plain = getattr(kind, name)

            def changed(self: Any, tensor: Any, role: str, gemm: int, plain: Any = plain) -> Any:
                count = len(self.forward.scale) // 3 if self.forward is not None else 1
                return plain(self, tensor, role, where(role, gemm, count))

            patch.setattr(kind, name, changed)

    return plant


def sharing(role: str, count: int) -> Plant:
    return other_quantizer(lambda seen, gemm, of: 0 if (seen, of) == (role, count) else gemm)


def swapped(role: str, count: int) -> Plant:
    return other_quantizer(lambda seen, gemm, of: (gemm + 1) % of if (seen, of) == (role, count) else gemm)


def only_the_scale_of_another(patch: Patch) -> None:
    """The second product of a block casts its input by the first one's scale, and keeps its own history."""
    kind = module("layer").Rounder
    plain, cast, state = kind._round, kind.cast, module("scaling")

    def second(self: Any, role: str, gemm: int) -> bool:
        return role == "input" and gemm == 1 and self.forward is not None and len(self.forward.scale) == 6

    def changed(self: Any, tensor: Any, role: str, gemm: int) -> Any:
        rounded = plain(self, tensor, role, gemm)
        if second(self, role, gemm):
            other = state.round_scaled(tensor, self.forward.scale[0], self.forward.top)
            rounded = other, other
        return rounded

    patch.setattr(kind, "_round", changed)
    patch.setattr(
        kind, "cast", lambda self, tensor, role, gemm: cast(self, tensor, role, 0 if second(self, role, gemm) else gemm)
    )


def saved_operand_loses_its_scale(patch: Patch) -> None:
    """What the backward pass multiplies again is read with a scale of its own."""
    plain = module("gemm")._product

    def changed(recipe: Any, product: str, first: Any, second: Any) -> Any:
        if product == "wgrad":
            first = first[0], module("quantized").Cast(first[1].quantizer, torch.ones(1)), first[2]
        return plain(recipe, product, first, second)

    patch.setattr(module("gemm"), "_product", changed)


SCOPES: dict[str, tuple[Plant, str]] = {
    "every-module-is-the-first": (first_is(True), "scopes.linear.gradient.history"),
    "no-module-is-the-first": (first_is(False), "scopes.updates.backward"),
    "forward-twice": (changed_update(twice_forward), "scopes.norm-linear.input.history"),
    "one-backward-update-for-two-scopes": (once_for_several_scopes(), "scopes.mlp.gradient.history"),
    "only-the-first-state": (changed_update(only_the_first_state), "scopes.experts.weight.history"),
    "last-amax-wins": (one_amax_wins(of_first=False), "scopes.linear.gradient.amax"),
    "first-amax-wins": (one_amax_wins(of_first=True), "scopes.linear.input.amax"),
    "mlp-shares-its-input": (sharing("input", 2), "scopes.mlp.input.scale"),
    "mlp-shares-its-weight": (sharing("weight", 2), "scopes.mlp.weight.amax"),
    "mlp-shares-its-gradient": (sharing("grad", 2), "scopes.mlp.gradient.scale"),
    "mlp-swaps-its-gradients": (swapped("grad", 2), "scopes.mlp.gradient.scale"),
    "mlp-borrows-a-scale": (only_the_scale_of_another, "scopes.mlp.input.scale"),
    "experts-share-their-input": (sharing("input", 3), "scopes.experts.input.amax"),
    "experts-share-their-gradient": (sharing("grad", 3), "scopes.experts.gradient.scale"),
    "experts-one-off": (swapped("weight", 3), "scopes.experts.weight.scale"),
    "saved-operand-loses-its-scale": (saved_operand_loses_its_scale, "scopes.norm-linear.input.kept"),
}


@pytest.mark.parametrize(("plant", "caught"), SCOPES.values(), ids=SCOPES.keys())
def test_a_fault_of_several_layers(te_double: None, plant: Plant, caught: str) -> None:
    with Patch.context() as patch:
        plant(patch)
        assert caught in failed(scopes())


@pytest.mark.parametrize("name", ["every-module-is-the-first", "mlp-shares-its-input", "experts-share-their-gradient"])
def test_a_fault_where_the_kernel_leaves_idle_histories_alone(te_double: None, name: str) -> None:
    plant, caught = SCOPES[name]
    with Patch.context() as patch:
        plant_kernel(patch)
        plant(patch)
        red = failed(scopes("fused"))
    assert caught in red
    if name == "every-module-is-the-first":  # of a layer that is called once, an update too many shows nothing there
        assert [check for check in red if "linear.gradient" not in check] == ["scopes.updates.backward"]


def test_products_that_are_not_seen_are_told(te_double: None) -> None:
    with Patch.context() as patch:
        plain = module("quantized").operand
        patch.setattr(module("gemm"), "operand", lambda values, cast: _bare(plain(values, cast)))
        assert "scopes.products" in failed(scopes())


def _bare(storage: Any) -> Any:
    storage._scale_inv = torch.ones(2)
    return storage


# --- accumulators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_a_product_that_accumulates_otherwise(te_double: None, recipe: Any, product: str) -> None:
    kinds = {"fprop": "forward", "dgrad": "dgrad", "wgrad": "wgrad"}
    layer = te.linear.require()(128, 128, bias=False, params_dtype=torch.bfloat16, device="cpu")
    with Patch.context() as patch:
        plain = module("gemm")._split
        patch.setattr(module("gemm"), "_split", lambda of, name: plain(of, name) is not (name == product))
        with watching_operands() as seen:
            with fp8_scope.low_precision(target=DOUBLE.id, amax_reduction_group=None, recipe=recipe):
                out = layer(torch.randn(128, 128, dtype=torch.bfloat16).requires_grad_())
            out.backward(torch.randn_like(out))
    bench = new_bench(recipe=recipe)
    check_operands(bench, "linear", recipe, seen, dict.fromkeys(kinds.values(), 1))
    assert failed(bench) == {f"linear.{kinds[product]}.accumulator"}


# --- saved and loaded -------------------------------------------------------------------------------------------------


def loading(change: Callable[[Any, dict[str, Any]], object]) -> Plant:
    """change(layer, states before) after a layer took a state over."""

    def plant(patch: Patch) -> None:
        kind = module("layer").TransformerEngineBaseModule
        plain = kind.set_extra_state

        def changed(self: Any, state: Any) -> None:
            keys = ("scaling_fwd", "scaling_bwd")
            before = {key: (self.fp8_meta[key].amax_history.clone(), self.fp8_meta[key].scale.clone())
                      for key in keys if key in self.fp8_meta}  # fmt: skip
            plain(self, state)
            if "scaling_fwd" in self.fp8_meta:
                change(self.fp8_meta, before)

        patch.setattr(kind, "set_extra_state", changed)

    return plant


def gradient_scale_stays(meta: Any, before: Any) -> None:
    if before:
        meta["scaling_bwd"].scale.copy_(before["scaling_bwd"][1])


def history_stays(meta: Any, before: Any) -> None:
    if before:
        meta["scaling_fwd"].amax_history.copy_(before["scaling_fwd"][0])


RESUMED: dict[str, tuple[Plant, str]] = {
    "gradient-scale-is-one": (
        loading(lambda meta, _: meta["scaling_bwd"].scale.fill_(1.0)),
        "resumed.fresh.linear.step",
    ),
    "gradient-scale-stays": (loading(gradient_scale_stays), "resumed.used.mlp.loaded"),
    "history-stays": (loading(history_stays), "resumed.used.experts.state"),
    "history-one-row-off": (
        loading(lambda meta, _: meta["scaling_bwd"].amax_history.copy_(meta["scaling_bwd"].amax_history.roll(1, 0))),
        "resumed.fresh.norm-linear.loaded",
    ),
    "second-product-is-dropped": (
        loading(lambda meta, _: meta["scaling_fwd"].scale[3:].fill_(1.0)),
        "resumed.fresh.mlp.step",
    ),
    "scale-in-bf16": (
        loading(lambda meta, _: meta["scaling_fwd"].scale.copy_(meta["scaling_fwd"].scale.bfloat16())),
        "resumed.fresh.linear.loaded",
    ),
    "another-rule-from-then-on": (
        loading(lambda meta, _: setattr(meta["scaling_bwd"], "top", 448.0)),
        "resumed.fresh.linear.state",
    ),
}


@pytest.mark.parametrize(("plant", "caught"), RESUMED.values(), ids=RESUMED.keys())
def test_a_fault_of_what_is_loaded(te_double: None, plant: Plant, caught: str) -> None:
    with Patch.context() as patch:
        plant(patch)
        assert caught in failed(resumed())


def test_a_state_that_is_not_saved(te_double: None) -> None:
    with Patch.context() as patch:
        kind = module("layer").TransformerEngineBaseModule
        patch.setattr(kind, "set_extra_state", lambda self, state: None)
        red = failed(resumed())
    assert "resumed.fresh.linear.loaded" in red
    assert "resumed.used.experts.step" in red
