"""The A-block probe: every path passes as it is, and every planted fault fails a check that names where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import attention as masks  # noqa: E402
from megacpp_validate.bridge import block_weights as weights  # noqa: E402
from megacpp_validate.bridge import native_block as bridge  # noqa: E402
from megacpp_validate.bridge.backends import Choice, Refusal  # noqa: E402
from megacpp_validate.native import block as native  # noqa: E402
from megacpp_validate.native.attention import apply_rope  # noqa: E402
from megacpp_validate.probes import native_block as probe_module  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.native_block import CASES, QUICK, REFUSED  # noqa: E402
from tests.probes import planted_numbers  # noqa: E402
from tests.probes.planted_numbers import RECIPES, failed, half_of_axis_1, in_gradient, run_probe  # noqa: E402

Fault = Callable[..., Any]
CPU_ONLY = ("again.", "microbatch.")  # which Transformer Engine must take too


run = partial(run_probe, probe_module)


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    bench = run(quick=quick)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"native"}
    cases = {case.name for case in CASES if case.name in QUICK or not quick}
    assert {row.path for row in bench.backends} == {
        *(f"native_block.{dtype}.{name}" for dtype in ("fp32", "bf16") for name in cases),
        *(f"native_block.bf16.{case.name}" for case in REFUSED),
    }


@pytest.mark.usefixtures("te_double")
def test_te_passes_in_every_recipe_and_is_seen() -> None:
    bench = run("te", RECIPES)
    assert failed(bench) == set()
    refused = {f"native_block.bf16.{case.name}" for case in REFUSED}
    refused |= {f"native_block.fp8.{recipe}.gqa4.d64.odd" for recipe in RECIPES}
    for row in bench.backends:
        assert row.claimed == ("native" if row.path in refused else "te")
        assert ("te" in row.observed) == (row.path not in refused)
    low = {row.path for row in bench.backends if ".fp8." in row.path} - refused
    assert low == {f"native_block.fp8.{recipe}.gqa4.d64.swiglu" for recipe in RECIPES}


@pytest.mark.usefixtures("te_double")
def test_a_recipe_without_a_reference_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "recipes", ("nvfp4",))  # the double has no such GPU
    assert failed(run("te", recipes=("nvfp4",))) == {"fp8.nvfp4.reference"}


@pytest.mark.usefixtures("te_double")
def test_a_recipe_that_this_release_refuses_is_the_firewalls_to_fail() -> None:
    bench = run("te", recipes=("delayed", "nvfp4"))
    assert failed(bench) == set()
    said = {check.name: check.detail for check in bench.checks}
    assert "not judged" in said["fp8.nvfp4.supported"]
    assert "see imports" in said["fp8.nvfp4.supported"]
    assert any(name.startswith("fp8.delayed.gqa4") for name in said)


# --- faults in what a path computes ------------------------------------------------------------------------


VALUES: dict[str, tuple[Fault, str]] = {
    **{name: (fault, "forward") for name, fault in planted_numbers.VALUES.items()},
    "half zeros": (half_of_axis_1, "forward"),
    "shuffled": (lambda x: x.roll(1, 1), "forward"),
    "another-dtype": (lambda x: x.double(), "dtype"),
    "gradient-zeroed": (in_gradient(torch.zeros_like), "grad.rows"),
    "gradient-x1.01": (in_gradient(lambda g: g * 1.01), "grad.qkv.weight.value"),
}


# The native path goes through the same comparison, without a native result beside it.
ON_BOTH = ("half zeros", "x1.01", "one NaN", "another-dtype", "gradient-x1.01")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "kind"), [*(("te", kind) for kind in VALUES), *(("native", kind) for kind in ON_BOTH)]
)
def test_a_fault_in_the_output_is_seen(te_double: None, monkeypatch: pytest.MonkeyPatch, path: str, kind: str) -> None:
    fault, named = VALUES[kind]
    kind = bridge.TeBlock if path == "te" else native.ABlock
    forward = kind.forward
    monkeypatch.setattr(bridge, "ABlock", type("ABlock", (native.ABlock,), {}))
    kind = bridge.TeBlock if path == "te" else bridge.ABlock
    monkeypatch.setattr(kind, "forward", lambda block, *args, **keywords: fault(forward(block, *args, **keywords)))
    if path == "native":
        monkeypatch.setenv("MEGACPP_DISABLE_TE_NATIVE_BLOCK", "1")
    wrong = failed(run(path))
    assert any(name.endswith(named) and name.startswith("bf16") for name in wrong), sorted(wrong)


def edit(part: str, **changes: Any) -> Fault:
    """Another value of an attribute in one of TE's layers."""

    def plant(block: Any) -> None:
        for name, value in changes.items():
            setattr(getattr(block, part), name, value)

    return plant


PARTS: dict[str, tuple[Fault, str]] = {
    "eps-of-the-first-norm": (edit("qkv", eps=1e-6), "small.forward"),
    "eps-of-the-second-norm": (edit("mlp", eps=1e-6), "small.forward"),
    "another-activation": (
        lambda block: block.mlp.activation == "gelu" and edit("mlp", activation="silu")(block),
        "gelu.forward",
    ),
    "keys-as-values": (edit("qkv", weight_names=["query_weight", "value_weight", "key_weight"]), "forward"),
    "softmax-scale": (edit("attention", softmax_scale=0.25), "forward"),
    "no-mask": (edit("attention", attn_mask_type="no_mask", window_size=(-1, -1)), "forward"),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("fault", "named"), PARTS.values(), ids=PARTS)
def test_a_fault_in_one_part_is_seen(monkeypatch: pytest.MonkeyPatch, fault: Fault, named: str) -> None:
    made = bridge.TeBlock.__init__

    def faulty(block: Any, **sizes: Any) -> None:
        made(block, **sizes)
        fault(block)

    monkeypatch.setattr(bridge.TeBlock, "__init__", faulty)
    wrong = failed(run("te"))
    assert any(name.endswith(named) for name in wrong), sorted(wrong)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(
    "turn",
    [
        lambda rows, rope: rows,
        lambda rows, rope: apply_rope(rows.transpose(1, 2), rope[0], -rope[1]).transpose(1, 2),
        lambda rows, rope: apply_rope(rows.transpose(1, 2), rope[0].roll(1, 0), rope[1]).transpose(1, 2),
    ],
    ids=["not-at-all", "the-other-way", "by-the-wrong-angle"],
)
def test_a_fault_in_the_rotary_embedding_is_seen(monkeypatch: pytest.MonkeyPatch, turn: Fault) -> None:
    monkeypatch.setattr(bridge, "_turn", turn)
    assert "bf16.gqa1.d64.gelu.forward" in failed(run("te"))


@pytest.mark.usefixtures("te_double")
def test_a_silent_fallback_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(block: Any, rows: Any, *, rope: Any, is_first_microbatch: Any) -> Any:
        owner = [made for made in owners if made.te is block][-1]
        return torch.func.functional_call(owner._plain[0], owner._weights(), (rows,), {"rope": rope})

    owners: list[Any] = []
    made = bridge.NativeBlock.__init__
    monkeypatch.setattr(
        bridge.NativeBlock, "__init__", lambda block, **sizes: (made(block, **sizes), owners.append(block))[0]
    )
    monkeypatch.setattr(bridge.TeBlock, "forward", plain)
    wrong = failed(run("te"))
    assert wrong
    assert all(name.endswith((".backend", ".layers")) for name in wrong if not name.startswith(CPU_ONLY))


@pytest.mark.usefixtures("te_double")
def test_a_fallback_that_is_told_is_a_failure_where_te_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("te", "planted", "it does not want to")
    monkeypatch.setattr(bridge, "_why_not_made_of_te", lambda *args: refusal)
    wrong = failed(run("te"))
    assert wrong
    assert all(name.endswith((".backend", ".layers")) for name in wrong if not name.startswith(CPU_ONLY))


def test_a_false_claim_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "choose", lambda name, candidates: Choice(name, "te", "te", ()))
    assert any(name.endswith(".backend") for name in failed(run()))


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("code", "case"), [("packed-documents", "packed"), ("local-window", "window")])
def test_a_refusal_that_was_dropped_is_seen(monkeypatch: pytest.MonkeyPatch, code: str, case: str) -> None:
    kept = tuple(row for row in masks.REFUSED_OPTIONS if row.code != code)
    monkeypatch.setattr(masks, "REFUSED_OPTIONS", kept)
    wrong = failed(run("te"))
    assert {f"bf16.gqa4.d64.{case}.refused", f"bf16.gqa4.d64.{case}.forward"} <= wrong


# --- faults in what happens to weights ---------------------------------------------------------------------


def exchange(name: str, fault: Fault) -> Callable[[Fault], Fault]:
    """Something done to one weight of a mapping that a function gives."""

    def plant(function: Fault) -> Fault:
        def faulty(*args: Any, **keywords: Any) -> Mapping[str, Any]:
            made = dict(function(*args, **keywords))
            return {**made, name: fault(made[name])}

        return faulty

    return plant


def halves(weight: Any) -> Any:
    return torch.cat(weight.chunk(2)[::-1])


WEIGHTS: dict[str, tuple[str, Callable[[Fault], Fault], str]] = {
    "gate-and-linear-half": ("to_te", exchange("mlp.fc1_weight", halves), "odd.forward"),
    "norms-scaled": ("to_te", exchange("qkv.layer_norm_weight", lambda w: w * 1.01), "forward"),
    "groups-swapped": ("to_te", exchange("qkv.key_weight", halves), "forward"),
    "heads-rolled": ("to_te", exchange("qkv.query_weight", lambda w: w.roll(64, 0)), "round-trip"),
    "kept-rounded": ("to_native", exchange("out.weight", lambda w: w * 1.01), "round-trip"),
    "state-not-checked": ("check_native_state", lambda function: lambda state, *_: state, "weights.missing"),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("name", "plant", "named"), WEIGHTS.values(), ids=WEIGHTS)
def test_a_fault_in_the_mapping_of_weights_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[Fault], Fault], named: str
) -> None:
    monkeypatch.setattr(bridge, name, plant(getattr(weights, name)))
    wrong = failed(run("te"))
    assert any(found.endswith(named) for found in wrong), sorted(wrong)


def test_naive_chunks_of_tensor_parallel_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "split_qkv", lambda weight, rank, tp_size, *_: weight.chunk(tp_size)[rank].clone())
    monkeypatch.setattr(weights, "join_qkv", lambda shards, **_: torch.cat(list(shards)))
    wrong = failed(run())
    assert {"shards.gqa4.d64.swiglu.attention", "shards.gqa1.d64.gelu.attention"} <= wrong
    assert not any(".joined" in name for name in wrong)  # a wrong split that undoes itself is still wrong


def test_a_gate_split_as_a_whole_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "split_gated", lambda fc1, rank, tp_size: fc1.chunk(tp_size)[rank].clone())
    monkeypatch.setattr(weights, "join_gated", lambda shards: torch.cat(list(shards)))
    wrong = failed(run())
    assert "shards.gqa4.d64.swiglu.mlp" in wrong
    assert "shards.gqa1.d64.gelu.mlp" not in wrong
