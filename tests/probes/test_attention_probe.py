"""The attention probe: every path passes as it is, and every planted fault fails a check that names where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import attention as bridge  # noqa: E402
from megacpp_validate.bridge import attention as masks  # noqa: E402
from megacpp_validate.bridge.backends import Choice, Refusal  # noqa: E402
from megacpp_validate.bridge.errors import BridgeError, WrongShape  # noqa: E402
from megacpp_validate.bridge.flash_attention import KERNELS  # noqa: E402
from megacpp_validate.native.attention import attention as native_attention  # noqa: E402
from megacpp_validate.probes import attention as probe_module  # noqa: E402
from megacpp_validate.probes.attention import CASES, PLAIN, QUICK, REFUSED, check_kernel  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from tests.probes.planted_numbers import VALUES, failed, half_of_axis_1, in_gradient, new_bench, run_probe  # noqa: E402

Fault = Callable[..., Any]


def run(requested: str = "native", *, quick: bool = True, backends: tuple[str, ...] = ("sdpa",)) -> Bench:
    return run_probe(probe_module, requested, quick=quick, attention=backends)


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    bench = run(quick=quick)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"sdpa"}
    cases = {case.name for case in CASES if case.name in QUICK or not quick}
    assert {row.path for row in bench.backends} == {
        *(f"attention.{dtype}.{name}" for dtype in ("fp32", "bf16") for name in cases),
        *(f"attention.bf16.{case.name}" for case in REFUSED),
        *(f"attention.{dtype}.{case.name}" for dtype, case in PLAIN),
    }
    refused = [check for check in bench.checks if check.name.endswith(".refused")]
    # By the table, on a machine without Transformer Engine too; and one token in each precision.
    assert len(refused) == 4 + 2 + sum(bool(case.code) for _, case in PLAIN)


@pytest.mark.usefixtures("te_double")
def test_te_passes_and_is_seen() -> None:
    bench = run("te", quick=False)
    assert failed(bench) == set()
    refused = {f"attention.bf16.{case.name}" for case in REFUSED}
    refused |= {f"attention.{dtype}.gqa4.d64.one-token" for dtype in ("fp32", "bf16")}
    refused |= {f"attention.{dtype}.{case.name}" for dtype, case in PLAIN if case.code}
    for row in bench.backends:
        assert row.claimed == ("sdpa" if row.path in refused else "te")
        assert ("te" in row.observed) == (row.path not in refused)


@pytest.mark.usefixtures("te_double")
def test_an_absent_flash_attention_is_told_and_no_failure() -> None:
    bench = run("te", backends=("te", "fa3", "fa4", "sdpa"))
    assert failed(bench) == set()
    rows = {row.path: row for row in bench.backends}
    for backend in ("fa3", "fa4"):
        if KERNELS[backend].vendor.is_available():
            pytest.skip("not-run: FlashAttention is in this environment")
        (check,) = [check for check in bench.checks if check.name == f"{backend}.present"]
        assert "absent" in check.detail
        assert "Next step" in rows[f"attention.{backend}"].reasons[0]


@pytest.mark.usefixtures("te_double")
def test_a_listed_flash_attention_that_is_there_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS["fa4"].vendor, "is_available", lambda: True)
    monkeypatch.setattr(bridge, "why_not_flash", lambda kernels, query, softcap: None)
    monkeypatch.setattr(
        bridge, "flash_attention", lambda kernels, *tensors, **options: native_attention(*tensors, **options)
    )
    wrong = failed(run("te", backends=("te", "fa4", "sdpa")))
    assert "attention.fa4.bf16.gqa4.d64.soft-cap.backend" in wrong  # it is claimed, and plain torch is seen
    assert not any(".forward" in name or ".grad" in name for name in wrong)


# --- faults ------------------------------------------------------------------------------------------------


def out(fault: Fault) -> Fault:
    """A fault in what attention gives."""
    return lambda attend, query, key, value, **options: fault(attend(query, key, value, **options))


def given(**faults: Fault) -> Fault:
    """Faults in what attention is given, by name of the tensor."""

    def run_it(attend: Fault, query: Any, key: Any, value: Any, **options: Any) -> Any:
        tensors = {"query": query, "key": key, "value": value}
        tensors |= {name: fault(tensors[name]) for name, fault in faults.items()}
        return attend(*tensors.values(), **options)

    return run_it


def sees_the_next(attend: Fault, query: Any, key: Any, value: Any, *, causal: bool = True, **options: Any) -> Any:
    """The causal mask off by one."""
    if (
        not causal
        or query.shape[2] == 1
        or any(options.get(name) is not None for name in ("doc_ids", "window", "softcap"))
    ):
        return attend(query, key, value, causal=causal, **options)
    length = query.shape[2]
    share = query.shape[1] // key.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril(1)
    keys, values = (tensor.repeat_interleave(share, dim=1) for tensor in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


FAULTS: dict[str, tuple[Fault, str]] = {
    **{name: (out(fault), "forward") for name, fault in VALUES.items() if name not in ("half zeros", "shuffled")},
    "half-zeros": (out(half_of_axis_1), "forward"),
    "shuffled-heads": (out(lambda x: x.roll(1, 1)), "forward"),
    "shuffled-rows": (out(lambda x: x.roll(1, 2)), "forward"),
    "another-dtype": (out(lambda x: x.double()), "dtype"),
    "groups-swapped": (given(key=lambda x: x.flip(1), value=lambda x: x.flip(1)), "forward"),
    "keys-of-another-group": (given(key=lambda x: x.flip(1)), "forward"),
    "scale": (given(query=lambda x: x * 2**0.5), "forward"),
    "causal-off-by-one": (sees_the_next, "forward"),
    "gradient-zeroed": (given(query=in_gradient(torch.zeros_like)), "grad.query"),
    "gradient-x1.01": (given(key=in_gradient(lambda g: g * 1.01)), "grad.key"),
    "gradient-half": (given(value=in_gradient(half_of_axis_1)), "grad.value"),
    "gradient-sign": (given(query=in_gradient(lambda g: -g)), "grad.query"),
    "gradient-detached": (given(key=lambda x: x.detach()), "grad.key"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "named"), FAULTS.values(), ids=FAULTS)
def test_a_fault_on_the_native_path_is_seen(monkeypatch: pytest.MonkeyPatch, fault: Fault, named: str) -> None:
    monkeypatch.setattr(
        bridge, "native_attention", lambda *tensors, **options: fault(native_attention, *tensors, **options)
    )
    if named == "grad.key" and fault is FAULTS["gradient-detached"][0]:
        with pytest.raises(RuntimeError, match="used in the graph"):
            run()
        return
    wrong = failed(run())
    assert any(name.endswith(named) and name.startswith("bf16") for name in wrong), sorted(wrong)


@pytest.mark.thorough
@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(
    ("fault", "named"),
    [row for name, row in FAULTS.items() if name not in ("causal-off-by-one", "gradient-detached")],
    ids=[name for name in FAULTS if name not in ("causal-off-by-one", "gradient-detached")],
)
def test_a_fault_in_what_te_gives_is_seen(monkeypatch: pytest.MonkeyPatch, fault: Fault, named: str) -> None:
    forward = bridge.TeAttention.forward

    def faulty(layer: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
        return fault(lambda *tensors, **more: forward(layer, *tensors, **more), query, key, value, **options)

    monkeypatch.setattr(bridge.TeAttention, "forward", faulty)
    wrong = failed(run("te"))
    assert any(name.endswith(named) for name in wrong), sorted(wrong)
    assert not any(case.name in name for case in REFUSED for name in wrong)  # those do not run on it


@pytest.mark.usefixtures("te_double")
def test_a_silent_fallback_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(layer: Any, query: Any, key: Any, value: Any, *, mask: str) -> Any:
        return native_attention(query, key, value, causal=mask == "causal", scale=layer.inner.softmax_scale)

    monkeypatch.setattr(bridge.TeAttention, "forward", plain)
    wrong = failed(run("te"))
    assert wrong
    assert all(name.endswith(".backend") for name in wrong)


@pytest.mark.usefixtures("te_double")
def test_a_fallback_that_is_told_is_a_failure_where_te_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("te", "planted", "it does not want to")
    monkeypatch.setattr(bridge.Attention, "_why_not_te", lambda layer, query: refusal)
    wrong = failed(run("te"))
    again = {name for name in wrong if name.startswith("again.")}
    assert again == {f"again.{name}.choice" for name in ("first", "others", "plain", "longer")}
    assert {name for name in wrong - again if name.endswith(".backend")} == wrong - again
    assert len(wrong - again) == 2 * (len(QUICK) - 1) + sum(not case.code for _, case in PLAIN)


def test_a_false_claim_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "choose", lambda name, candidates: Choice(name, "te", "te", ()))
    assert any(name.endswith(".backend") for name in failed(run()))


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("row", masks.REFUSED_OPTIONS, ids=lambda row: row.code)
def test_a_refusal_that_was_dropped_is_seen(monkeypatch: pytest.MonkeyPatch, row: masks.RefusedOption) -> None:
    kept = tuple(
        replace(other, backends=other.backends - {"te"}) if other == row else other for other in masks.REFUSED_OPTIONS
    )
    monkeypatch.setattr(masks, "REFUSED_OPTIONS", kept)
    wrong = failed(run("te"))
    named = {"packed-documents": "packed", "local-window": "window", "block-routing": "blocks", "soft-cap": "soft-cap"}
    assert f"bf16.gqa4.d64.{named[row.code]}.refused" in wrong
    assert f"bf16.gqa4.d64.{named[row.code]}.forward" in wrong  # Transformer Engine attends without the mask


def without(option: str) -> Fault:
    return lambda attend, *tensors, **options: attend(*tensors, **{**options, option: None})


@pytest.mark.parametrize("option", ["doc_ids", "window", "softcap"])
def test_an_option_that_is_not_passed_on_is_seen(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    fault = without(option)
    monkeypatch.setattr(
        bridge, "native_attention", lambda *tensors, **options: fault(native_attention, *tensors, **options)
    )
    case = {"doc_ids": "packed", "window": "window", "softcap": "soft-cap"}[option]
    wrong = failed(run())
    assert f"bf16.gqa4.d64.{case}.forward" in wrong
    assert all(case in name for name in wrong)


def _keeping(attention: Any, key: Callable[[Any], Any]) -> Fault:
    """The bridge's attention with what it kept of a call that looks alike: nothing else of the call is compared."""
    decide = attention._decide

    def stale(layer: Any, query: Any, *rest: Any) -> Any:
        kept = layer.__dict__.setdefault("_kept", {})
        if key(query) not in kept:
            kept[key(query)] = decide(layer, query, *rest)
        layer.__dict__["choice"] = kept[key(query)]
        return layer.choice

    return stale


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(
    ("key", "named"),
    [(lambda query: query.shape, "again.window.forward"), (lambda query: query.dtype, "again.one-token.choice")],
    ids=["options", "shape"],
)
def test_a_choice_kept_for_another_call_is_seen(
    monkeypatch: pytest.MonkeyPatch, key: Callable[[Any], Any], named: str
) -> None:
    stale = _keeping(bridge.Attention, key)
    monkeypatch.setattr(bridge.Attention, "_decide", stale)
    # Of the same shape as the call before: a window on tensors of the length that the plain calls had.
    assert named in failed(run("te"))


def test_a_second_call_with_other_numbers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = bridge.Attention.forward

    def grows(layer: Any, *tensors: Any, **options: Any) -> Any:
        calls = layer.__dict__["_calls"] = layer.__dict__.get("_calls", 0) + 1
        return forward(layer, *tensors, **options) * (1.0 if calls == 1 else 1.02)

    monkeypatch.setattr(bridge.Attention, "forward", grows)
    wrong = failed(run())
    assert {"again.first.bits", "again.others.forward"} <= wrong
    assert all(name.startswith("again.") for name in wrong)


def test_noise_below_every_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(0)

    def noisy(query: Any, key: Any, value: Any, **options: Any) -> Any:
        more = 1 + 1e-7 * torch.rand(value.shape, generator=noise)
        return native_attention(query, key, value * more.to(value.dtype), **options)

    monkeypatch.setattr(bridge, "native_attention", noisy)
    wrong = failed(run())
    assert "again.first.bits" in wrong
    assert all(name.endswith(".bits") for name in wrong)


def test_a_scale_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = without("scale")
    monkeypatch.setattr(
        bridge, "native_attention", lambda *tensors, **options: fault(native_attention, *tensors, **options)
    )
    wrong = failed(run())
    assert "fp32.gqa4.d64.scale.forward" in wrong
    assert all(".scale." in name for name in wrong)


def test_documents_of_the_first_row_for_all_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(*tensors: Any, doc_ids: Any = None, **options: Any) -> Any:
        doc_ids = None if doc_ids is None else doc_ids[:1].expand_as(doc_ids)
        return native_attention(*tensors, doc_ids=doc_ids, **options)

    monkeypatch.setattr(bridge, "native_attention", first)
    wrong = failed(run())
    assert "bf16.gqa4.d64.packed.forward" in wrong
    assert all("packed" in name for name in wrong)


def test_routing_by_the_wrong_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bridge.visible_keys
    monkeypatch.setattr(bridge, "visible_keys", lambda *args: right(*args).roll(1, -2))
    assert "bf16.gqa4.d64.blocks.forward" in failed(run())


def test_an_error_without_a_next_step_or_of_another_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = bridge.Attention._check

    def silent(layer: Any, *tensors: Any) -> None:
        if tensors[0].dim() != 4:
            raise WrongShape("no")
        if tensors[0].dtype == torch.int64:
            raise BridgeError("Next step: none.")
        checked(layer, *tensors)

    monkeypatch.setattr(bridge.Attention, "_check", silent)
    assert failed(run()) == {"refuses.rank", "refuses.dtype"}


def test_input_that_is_let_through_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks.Masks, "check", lambda *args: None)
    wrong = failed(run())
    assert {"refuses.packed-and-windowed", "refuses.window-of-none", "refuses.documents-shape"} <= wrong
    assert all(name.startswith("refuses.") for name in wrong)


# --- the kernel by which TE's attention ran: written down, and half precision that runs unfused is a failure ----


def kernels_of(bench: Bench) -> dict[str, bool]:
    tail = ".kernel.backend"
    return {check.name.removesuffix(tail): check.passed for check in bench.checks if check.name.endswith(tail)}


@pytest.mark.usefixtures("te_double")
def test_the_kernel_of_every_path_by_te_is_written_down() -> None:
    bench = run("te", quick=False)
    rows = {row.path.removeprefix("attention."): row for row in bench.backends if row.claimed == "te"}
    assert kernels_of(bench) == dict.fromkeys(rows, True)
    for path, row in rows.items():
        assert row.observed == ("te", "unfused" if path.startswith("fp32") else "cudnn")


@pytest.mark.usefixtures("te_double")
def test_grouped_queries_that_run_unfused_are_a_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = bridge.te.dot_product_attention.require()
    fused = kind.is_fused
    monkeypatch.setattr(kind, "is_fused", lambda layer, q, k: q.shape[2] == k.shape[2] and fused(layer, q, k))
    grouped = {f"bf16.gqa4.d64.{name}" for name in ("odd", "strided", "no-mask")} | {"fp16.gqa4.d64.fp16"}
    assert failed(run("te")) == {f"{name}.kernel.backend" for name in grouped}


@pytest.mark.usefixtures("te_double")
def test_nothing_fused_is_expected_where_there_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge.te.dot_product_attention.require(), "is_fused", lambda layer, query, key: False)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")  # the user's own wish
    assert failed(run("te")) == set()
    monkeypatch.delenv("NVTE_FUSED_ATTN")
    assert failed(run("te")) != set()


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
