"""The probe of attention passes on both paths, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import attention as bridge
from megacpp_validate.bridge import attention as masks
from megacpp_validate.bridge.backends import Choice, Refusal
from megacpp_validate.bridge.errors import BridgeError, WrongShape
from megacpp_validate.bridge.flash_attention import KERNELS
from megacpp_validate.native.attention import attention as plain_attention
from megacpp_validate.probes import attention as probe
from megacpp_validate.probes.attention import PLAIN, REFUSED, check_kernel
from megacpp_validate.probes.bench import Bench
from tests.probes.planting import (
    VALUES,
    Fault,
    Patch,
    Plant,
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


def whole(bench: Bench) -> None:
    probe.probe(bench)
    probe.probe_last(bench)


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    bench = run(quick=quick)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"sdpa"}
    refused = [check for check in bench.checks if check.name.endswith(".refused")]
    assert len(refused) == 4 + 2 + sum(bool(case.code) for _, case in PLAIN)


@pytest.mark.usefixtures("te_double")
def test_te_passes_and_is_seen_with_its_kernel() -> None:
    bench = run("te", quick=False)
    assert failed(bench) == set()
    refused = {f"attention.bf16.{case.name}" for case in REFUSED}
    refused |= {f"attention.{dtype}.gqa4.d64.one-token" for dtype in ("fp32", "bf16")}
    refused |= {f"attention.{dtype}.{case.name}" for dtype, case in PLAIN if case.code}
    for row in bench.backends:
        assert row.claimed == ("sdpa" if row.path in refused else "te")
        if row.path not in refused:
            assert row.observed == ("te", "unfused" if row.path.startswith("attention.fp32") else "cudnn")


@pytest.mark.usefixtures("te_double")
def test_flash_attention_that_is_absent_and_one_that_is_there_and_does_not_run(monkeypatch: Patch) -> None:
    if any(kernels.vendor.is_available() for kernels in KERNELS.values()):
        pytest.skip("not-run: FlashAttention is in this environment")
    bench = run("te", attention=("te", "fa3", "fa4", "sdpa"))
    assert failed(bench) == set()
    assert all(any("Next step" in row.reasons[0] for row in bench.backends if row.path.endswith(f)) for f in KERNELS)
    monkeypatch.setattr(KERNELS["fa4"].vendor, "is_available", lambda: True)
    monkeypatch.setattr(bridge, "why_not_flash", lambda kernels, query, softcap: None)
    monkeypatch.setattr(bridge, "flash_attention", lambda kernels, *given, **more: plain_attention(*given, **more))
    wrong = failed(run("te", attention=("te", "fa4", "sdpa")))
    assert "attention.fa4.bf16.gqa4.d64.soft-cap.backend" in wrong  # it is claimed, and plain torch is seen
    assert not any(".forward" in name or ".grad" in name for name in wrong)


def out(fault: Fault) -> Fault:
    return lambda attend, *tensors, **options: fault(attend(*tensors, **options))


def given(**faults: Fault) -> Fault:
    """Faults in what attention is given, by name of the tensor."""

    def attended(attend: Fault, query: Any, key: Any, value: Any, **options: Any) -> Any:
        tensors = {"query": query, "key": key, "value": value}
        return attend(*(faults.get(name, lambda one: one)(one) for name, one in tensors.items()), **options)

    return attended


def without(option: str) -> Fault:
    return lambda attend, *tensors, **options: attend(*tensors, **{**options, option: None})


def sees_the_next(attend: Fault, query: Any, key: Any, value: Any, *, causal: bool = True, **options: Any) -> Any:
    """The causal mask off by one."""
    special = any(options.get(name) is not None for name in ("doc_ids", "window", "softcap"))
    if not causal or query.shape[2] == 1 or special:
        return attend(query, key, value, causal=causal, **options)
    mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril(1)
    keys, values = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def documents_of_the_first_row(attend: Fault, *tensors: Any, doc_ids: Any = None, **options: Any) -> Any:
    return attend(*tensors, doc_ids=None if doc_ids is None else doc_ids[:1].expand_as(doc_ids), **options)


NUMBERS: dict[str, tuple[Fault, str]] = {
    **{name: (out(fault), "bf16*.forward") for name, fault in VALUES.items() if name not in ("half zeros", "shuffled")},
    "half-zeros": (out(half_of(1)), "bf16*.forward"),
    "shuffled-rows": (out(lambda x: x.roll(1, 2)), "bf16*.forward"),
    "another-dtype": (out(lambda x: x.double()), "bf16*.dtype"),
    "keys-of-another-group": (given(key=lambda x: x.flip(1)), "bf16*.forward"),
    "scale": (given(query=lambda x: x * 2**0.5), "bf16*.forward"),
    "gradient-zeroed": (given(query=in_gradient(torch.zeros_like)), "bf16*.grad.query"),
    "gradient-x1.01": (given(key=in_gradient(lambda g: g * 1.01)), "bf16*.grad.key"),
    "gradient-half": (given(value=in_gradient(half_of(1))), "bf16*.grad.value"),
}
OF_NATIVE: dict[str, tuple[Fault, str]] = {
    **NUMBERS,
    "causal-off-by-one": (sees_the_next, "bf16*.forward"),
    "no-documents": (without("doc_ids"), "bf16.gqa4.d64.packed.forward"),
    "no-window": (without("window"), "bf16.gqa4.d64.window.forward"),
    "no-softcap": (without("softcap"), "bf16.gqa4.d64.soft-cap.forward"),
    "no-scale": (without("scale"), "fp32.gqa4.d64.scale.forward"),
    "first-documents": (documents_of_the_first_row, "bf16.gqa4.d64.packed.forward"),
}


@pytest.mark.parametrize(("fault", "named"), OF_NATIVE.values(), ids=OF_NATIVE)
def test_a_fault_on_the_native_path_is_seen(fault: Fault, named: str) -> None:
    plant = putting(bridge, "native_attention", partial(fault, plain_attention))
    check_caught(new_bench("attention"), whole, plant, {named})


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("fault", "named"), NUMBERS.values(), ids=NUMBERS)
def test_a_fault_in_what_te_gives_is_seen(fault: Fault, named: str) -> None:
    make = lambda real: lambda layer, *tensors, **more: fault(partial(real, layer), *tensors, **more)  # noqa: E731
    plant = changing(bridge.TeAttention, "forward", make)
    wrong = check_caught(new_bench("attention", "te"), whole, plant, {named})
    assert not any(case.name in name for case in REFUSED for name in wrong)  # those do not run on it


def kept_by(key: Fault) -> Plant:
    """A choice that is kept for calls that look alike."""

    def make(decide: Any) -> Any:
        def stale(layer: Any, query: Any, *rest: Any) -> Any:
            kept = layer.__dict__.setdefault("_kept", {})
            if key(query) not in kept:
                kept[key(query)] = decide(layer, query, *rest)
            layer.__dict__["choice"] = kept[key(query)]
            return layer.choice

        return stale

    return changing(bridge.Attention, "_decide", make)


def native_in_its_place(layer: Any, query: Any, key: Any, value: Any, *, mask: str) -> Any:
    return plain_attention(query, key, value, causal=mask == "causal", scale=layer.inner.softmax_scale)


def unfused_groups(patch: Patch) -> None:
    kind = bridge.te.dot_product_attention.require()
    fused = kind.is_fused
    patch.setattr(kind, "is_fused", lambda layer, q, k: q.shape[2] == k.shape[2] and fused(layer, q, k))


REFUSAL = Refusal("te", "planted", "it does not want to")
BY_TE: dict[str, tuple[Plant, set[str]]] = {
    "silent-fallback": (putting(bridge.TeAttention, "forward", native_in_its_place), {"attention.bf16.*.backend"}),
    "fallback": (
        putting(bridge.Attention, "_why_not_te", lambda layer, query: REFUSAL),
        {"attention.fp32.*.backend", "again.first.choice", "again.longer.choice"},
    ),
    "kept-for-other-options": (kept_by(lambda query: query.shape), {"again.window.forward"}),
    "kept-for-another-shape": (kept_by(lambda query: query.dtype), {"again.one-token.choice"}),
    "grouped-queries-unfused": (unfused_groups, {"bf16.gqa4.d64.odd.kernel.backend", "fp16.*.kernel.backend"}),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "named"), BY_TE.values(), ids=BY_TE)
def test_a_fault_of_the_path_by_te_is_seen(plant: Plant, named: set[str]) -> None:
    check_caught(new_bench("attention", "te"), whole, plant, named)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("row", masks.REFUSED_OPTIONS, ids=lambda row: row.code)
def test_a_refusal_that_was_dropped_is_seen(row: masks.RefusedOption) -> None:
    kept = [replace(one, backends=one.backends - {"te"}) if one == row else one for one in masks.REFUSED_OPTIONS]
    named = {"packed-documents": "packed", "local-window": "window", "block-routing": "blocks", "soft-cap": "soft-cap"}
    wanted = {f"bf16.gqa4.d64.{named[row.code]}.{what}" for what in ("refused", "forward")}
    check_caught(new_bench("attention", "te"), whole, putting(masks, "REFUSED_OPTIONS", tuple(kept)), wanted)


def grows(real: Any) -> Any:
    def forward(layer: Any, *tensors: Any, **options: Any) -> Any:
        calls = layer.__dict__["_calls"] = layer.__dict__.get("_calls", 0) + 1
        return real(layer, *tensors, **options) * (1.0 if calls == 1 else 1.02)

    return forward


def noisy(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return plain_attention(query, key, value * (1 + 1e-7 * torch.rand(value.shape)).to(value.dtype), **options)


def other_errors(checked: Any) -> Any:
    def check(layer: Any, *tensors: Any) -> None:
        if tensors[0].dim() != 4:
            raise WrongShape("no")
        if tensors[0].dtype == torch.int64:
            raise BridgeError("Next step: none.")
        checked(layer, *tensors)

    return check


OTHERS: dict[str, tuple[Plant, set[str]]] = {
    "false-claim": (
        putting(bridge, "choose", lambda name, candidates: Choice(name, "te", "te", ())), {"attention.*.backend"},
    ),
    "second-call": (changing(bridge.Attention, "forward", grows), {"again.first.bits", "again.others.forward"}),
    "noise-below-every-bound": (putting(bridge, "native_attention", noisy), {"again.first.bits"}),
    "wrong-block": (
        changing(bridge, "visible_keys", lambda real: lambda *given: real(*given).roll(1, -2)),
        {"bf16.gqa4.d64.blocks.forward"},
    ),
    "errors": (changing(bridge.Attention, "_check", other_errors), {"refuses.rank", "refuses.dtype"}),
    "masks-unchecked": (
        putting(masks.Masks, "check", lambda *_: None),
        {"refuses.packed-and-windowed", "refuses.window-of-none", "refuses.documents-shape"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "named"), OTHERS.values(), ids=OTHERS)
def test_another_fault_is_seen(plant: Plant, named: set[str]) -> None:
    check_caught(new_bench("attention"), whole, plant, named)


@pytest.mark.usefixtures("te_double")
def test_nothing_fused_is_expected_where_the_user_turned_it_off(monkeypatch: Patch) -> None:
    monkeypatch.setattr(bridge.te.dot_product_attention.require(), "is_fused", lambda layer, query, key: False)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert failed(run("te")) == set()


@pytest.mark.parametrize(
    ("arch", "dtype", "made", "passed"),
    [
        ("sm_90", torch.bfloat16, "softmax", False),  # no name of Transformer Engine's, and torch's own softmax
        ("sm_100", torch.float16, "softmax", False),
        ("sm_121", torch.bfloat16, "softmax", True),
        ("sm_90", torch.float32, "softmax", True),
        ("sm_90", torch.bfloat16, "unknown", True),
    ],
)
def test_which_calls_have_a_fused_kernel(arch: str, dtype: Any, made: str, passed: bool) -> None:
    bench = new_bench("attention", "te", arch=arch)
    leaf = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    check_kernel(bench, "case", leaf.softmax(-1) if made == "softmax" else leaf * 2)
    (check,) = bench.checks
    assert check.passed is passed
    assert ("unfused" in check.detail) is (made == "softmax")
