"""The probes of the A-block, by itself and as the layer of the spec, pass; each planted fault fails its check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import attention as masks
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge import layer_spec as spec
from megacpp_validate.bridge import native_block as bridge
from megacpp_validate.bridge.backends import Choice, Refusal
from megacpp_validate.native.attention import apply_rope
from megacpp_validate.native.block import ABlock
from megacpp_validate.probes import native_block as probe
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.whole_layer import check_whole_layer
from tests.probes.planting import (
    RECIPES,
    VALUES,
    Fault,
    Patch,
    Plant,
    after,
    changing,
    check_caught,
    failed,
    half_of,
    in_gradient,
    new_bench,
    putting,
    run_probe,
)  # fmt: skip

run = partial(run_probe, probe)


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    bench = run(quick=quick)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
def test_te_passes_in_every_recipe_and_is_seen() -> None:
    bench = run("te", RECIPES)
    assert failed(bench) == set()
    refused = {f"native_block.bf16.{case.name}" for case in probe.REFUSED}
    refused |= {f"native_block.fp8.{recipe}.gqa4.d64.odd" for recipe in RECIPES}
    for row in bench.backends:
        assert row.claimed == ("native" if row.path in refused else "te")
        assert ("te" in row.observed) == (row.path not in refused)
    low = {row.path for row in bench.backends if ".fp8." in row.path} - refused
    assert low == {f"native_block.fp8.{recipe}.gqa4.d64.swiglu" for recipe in RECIPES}


def edit(part: str, **changes: Any) -> Plant:
    """Another value of an attribute in one of TE's layers."""

    def make(init: Any) -> Any:
        def made(block: Any, **sizes: Any) -> None:
            init(block, **sizes)
            for name, value in changes.items():
                setattr(getattr(block, part), name, value)

        return made

    return changing(bridge.TeBlock, "__init__", make)


def exchange(function: str, name: str, fault: Fault) -> Plant:
    """Something done to one weight of a mapping that a function gives."""

    def faulty(made: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**made, name: fault(made[name])}

    return after(bridge, function, faulty)


def halves(weight: Any) -> Any:
    return torch.cat(weight.chunk(2)[::-1])


def turned(turn: Fault) -> Plant:
    return putting(bridge, "_turn", lambda rows, rope: turn(rows.transpose(1, 2), *rope).transpose(1, 2))


def silent_fallback(patch: Patch) -> None:
    owners: list[Any] = []
    made = bridge.NativeBlock.__init__
    both = lambda block, **sizes: (made(block, **sizes), owners.append(block))[0]  # noqa: E731

    def plain(block: Any, rows: Any, *, rope: Any, is_first_microbatch: Any) -> Any:
        owner = [made for made in owners if made.te is block][-1]
        return torch.func.functional_call(owner._plain[0], owner._weights(), (rows,), {"rope": rope})

    patch.setattr(bridge.NativeBlock, "__init__", both)
    patch.setattr(bridge.TeBlock, "forward", plain)


def dropped(code: str) -> Plant:
    return putting(masks, "REFUSED_OPTIONS", tuple(row for row in masks.REFUSED_OPTIONS if row.code != code))


def grows(real: Any) -> Any:
    def forward(layer: Any, rows: Any, **options: Any) -> Any:
        calls = layer.__dict__["_calls"] = layer.__dict__.get("_calls", 0) + 1
        return real(layer, rows, **options) * (1.0 if calls == 1 else 1.02)

    return forward


def microbatch_dropped(real: Any) -> Any:
    return lambda self, rows, **given: real(self, rows, rope=given.get("rope"), is_first_microbatch=None)


FORWARD = {"bf16.gqa1.d64.gelu.forward"}
REFUSAL = Refusal("te", "planted", "it does not want to")
BY_TE: dict[str, tuple[Plant, set[str]]] = {
    **{name: (after(bridge.TeBlock, "forward", fault), FORWARD) for name, fault in VALUES.items()},
    "half-of-the-rows": (after(bridge.TeBlock, "forward", half_of(1)), FORWARD),
    "another-dtype": (after(bridge.TeBlock, "forward", lambda x: x.double()), {"bf16.gqa1.d64.gelu.dtype"}),
    "gradient-x1.01": (
        after(bridge.TeBlock, "forward", in_gradient(lambda g: g * 1.01)), {"bf16.*.grad.qkv.weight.value"},
    ),
    "eps-of-the-first-norm": (edit("qkv", eps=1e-6), {"*.small.forward"}),
    "eps-of-the-second-norm": (edit("mlp", eps=1e-6), {"*.small.forward"}),
    "another-activation": (edit("mlp", activation="silu"), {"fp32.gqa1.d64.gelu.forward"}),
    "keys-as-values": (edit("qkv", weight_names=["query_weight", "value_weight", "key_weight"]), FORWARD),
    "softmax-scale": (edit("attention", softmax_scale=0.25), FORWARD),
    "no-mask": (edit("attention", attn_mask_type="no_mask", window_size=(-1, -1)), FORWARD),
    "not-turned": (putting(bridge, "_turn", lambda rows, rope: rows), FORWARD),
    "turned-the-other-way": (turned(lambda rows, cos, sin: apply_rope(rows, cos, -sin)), FORWARD),
    "turned-by-the-wrong-angle": (turned(lambda rows, cos, sin: apply_rope(rows, cos.roll(1, 0), sin)), FORWARD),
    "silent-fallback": (silent_fallback, {"native_block.bf16.*.backend", "bf16.*.layers"}),
    "fallback": (putting(bridge, "_why_not_made_of_te", lambda *_: REFUSAL), {"native_block.bf16.*.backend"}),
    "documents-taken": (dropped("packed-documents"), {f"bf16.gqa4.d64.packed.{x}" for x in ("refused", "forward")}),
    "window-taken": (dropped("local-window"), {f"bf16.gqa4.d64.window.{x}" for x in ("refused", "forward")}),
    "gate-and-linear-half": (exchange("to_te", "mlp.fc1_weight", halves), {"*.odd.forward"}),
    "norms-scaled": (exchange("to_te", "qkv.layer_norm_weight", lambda w: w * 1.01), FORWARD),
    "groups-swapped": (exchange("to_te", "qkv.key_weight", halves), FORWARD),
    "heads-rolled": (exchange("to_te", "qkv.query_weight", lambda w: w.roll(64, 0)), {"weights.*.round-trip"}),
    "kept-rounded": (exchange("to_native", "out.weight", lambda w: w * 1.01), {"weights.*.round-trip"}),
    "state-not-checked": (putting(bridge, "check_native_state", lambda state, *_: state), {"weights.missing"}),
    "microbatch-not-passed-on": (
        changing(bridge.TeBlock, "forward", microbatch_dropped), {"microbatch.True", "microbatch.False"},
    ),
}  # fmt: skip
ON_NATIVE: dict[str, tuple[Plant, set[str]]] = {
    **{name: (after(ABlock, "forward", VALUES[name]), FORWARD) for name in ("half zeros", "x1.01", "one NaN")},
    "false-claim": (
        putting(bridge, "choose", lambda name, candidates: Choice(name, "te", "te", ())), {"native_block.*.backend"},
    ),
    "second-call": (
        changing(bridge.NativeBlock, "forward", grows), {"again.0.gqa4.d64.swiglu.bits", "again.1.*.forward"},
    ),
}  # fmt: skip


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "wanted"), BY_TE.values(), ids=BY_TE)
def test_a_fault_of_the_path_by_te_is_seen(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("native_block", "te"), probe.probe, plant, wanted)


@pytest.mark.parametrize(("plant", "wanted"), ON_NATIVE.values(), ids=ON_NATIVE)
def test_a_fault_of_the_native_path_is_seen(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("native_block"), probe.probe, plant, wanted)


@pytest.mark.usefixtures("te_double")
def test_recipes_without_a_reference_and_recipes_that_are_refused(monkeypatch: Patch) -> None:
    bench = run("te", ("delayed", "nvfp4"))  # the double has no such GPU
    assert failed(bench) == set()
    said = {check.name: check.detail for check in bench.checks}
    assert "see imports" in said["fp8.nvfp4.supported"]
    monkeypatch.setattr(Bench, "recipes", ("nvfp4",))
    assert failed(run("te", ("nvfp4",))) == {"fp8.nvfp4.reference"}


# --- as the layer of the spec -----------------------------------------------------------------------------------------


def whole(bench: Bench) -> None:
    torch.manual_seed(bench.order.seed)
    check_whole_layer(bench, spec)


@pytest.mark.parametrize("requested", ["native", "te"])
def test_the_whole_layer_passes(request: pytest.FixtureRequest, requested: str) -> None:
    if requested == "te":
        request.getfixturevalue("te_double")
    for seed, quick in ((0, True), (1, False)):
        bench = new_bench("layer_spec", requested, RECIPES if requested == "te" else (), quick=quick, seed=seed)
        whole(bench)
        assert failed(bench) == set()
        assert {backend.claimed for backend in bench.backends} == {requested}


def layer_like(change: Callable[[Any], type]) -> Plant:
    def plant(patch: Patch) -> None:
        kind = change(te.transformer_layer.require())
        kind.__module__ = te.transformer_layer.require().__module__
        patch.setattr(te.transformer_layer, "_found", (kind, ""))

    return plant


def made_with(**other: Any) -> Plant:
    """The vendor's layer, made with something else than was asked for."""

    def change(real: Any) -> type:
        class TransformerLayer(real):  # type: ignore[misc]
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **{**named, **other})

        return TransformerLayer

    return layer_like(change)


def giving(fault: Callable[[Any, Any], Any]) -> Plant:
    """The vendor's layer, whose output is `fault(forward, rows)`."""

    def change(real: Any) -> type:
        class TransformerLayer(real):  # type: ignore[misc]
            def forward(self, rows: Any) -> Any:
                return fault(super().forward, rows)

        return TransformerLayer

    return layer_like(change)


def outside_of_the_scope(forward: Any, rows: Any) -> Any:
    with te.autocast.require()(enabled=False):
        return forward(rows)


def plain_projection(real: Any) -> type:
    class TransformerLayer(real):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            plain = torch.nn.Linear(64, 64, bias=False, dtype=named["params_dtype"])
            own = plain.forward
            plain.forward = lambda rows, is_first_microbatch=None: own(rows)
            self.self_attention.proj = plain

    return TransformerLayer


BOTH = {"bf16.whole.gqa4.forward", "fp32.whole.gqa4.forward"}
WHOLE: dict[str, tuple[Plant, set[str]]] = {
    "attention dropout": (made_with(attention_dropout=0.1), {*BOTH, "bf16.whole.gqa4.forward.repeated"}),
    "a little attention dropout": (made_with(attention_dropout=0.001), {"fp32.whole.gqa4.forward.repeated"}),
    "hidden dropout": (made_with(hidden_dropout=0.1), {*BOTH, "fp32.whole.gqa4.forward.repeated"}),
    "eps": (made_with(layernorm_epsilon=1e-6), {f"{dtype}.whole.gqa4.small.forward" for dtype in ("bf16", "fp32")}),
    "mask": (made_with(self_attn_mask_type="no_mask"), BOTH),
    "activation": (made_with(activation="geglu"), BOTH),
    "order of the joint weight": (made_with(qkv_weight_interleaved=False), BOTH),
    "a residual twice": (giving(lambda forward, rows: forward(rows) + rows), BOTH),
    "one percent": (giving(lambda forward, rows: forward(rows) * 1.01), BOTH),
    "gradient": (giving(lambda f, rows: in_gradient(lambda g: g * 1.02)(f(rows))), {"bf16.whole.gqa4.grad.rows"}),
    "dtype": (giving(lambda forward, rows: forward(rows).double()), {"bf16.whole.gqa4.dtype"}),
    "other parameters": (made_with(fuse_qkv_params=False), {f"{x}.whole.gqa4.parameters" for x in ("bf16", "delayed")}),
    "outside of the scope": (giving(outside_of_the_scope), {f"{r}.whole.gqa4.grad.applied" for r in RECIPES}),
    "a part that is not the vendor's": (layer_like(plain_projection), {"bf16.whole.gqa4.layers"}),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "wanted"), WHOLE.values(), ids=WHOLE)
def test_a_fault_of_the_vendors_layer_is_caught(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("layer_spec", "te", RECIPES, quick=False), whole, plant, wanted)
