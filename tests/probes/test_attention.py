"""The probe of attention passes on both paths, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import attention as bridge
from megacpp_validate.bridge.backends import Choice, Refusal
from megacpp_validate.bridge.flash_attention import KERNELS
from megacpp_validate.native.attention import attention as plain_attention
from megacpp_validate.probes import attention as probe
from megacpp_validate.probes.attention import REFUSED, check_kernel
from megacpp_validate.probes.bench import Bench
from tests.probes.planting import (
    Fault,
    Patch,
    Plant,
    check_caught,
    failed,
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
    assert len(refused) == len(REFUSED) + 2


@pytest.mark.usefixtures("te_double")
def test_te_passes_and_is_seen_with_its_kernel() -> None:
    bench = run("te", quick=False)
    assert failed(bench) == set()
    refused = {f"attention.bf16.{case.name}" for case in REFUSED}
    refused |= {f"attention.{dtype}.gqa4.d64.one-token" for dtype in ("fp32", "bf16")}
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


NUMBERS: dict[str, tuple[Fault, str]] = {
    "gradient-x1.01": (
        lambda attend, q, k, v, **more: attend(q, in_gradient(lambda g: g * 1.01)(k), v, **more),
        "bf16*.grad.key",
    ),
}


@pytest.mark.parametrize(("fault", "named"), NUMBERS.values(), ids=NUMBERS)
def test_a_fault_on_the_native_path_is_seen(fault: Fault, named: str) -> None:
    plant = putting(bridge, "native_attention", partial(fault, plain_attention))
    check_caught(new_bench("attention"), whole, plant, {named})


def unfused_groups(patch: Patch) -> None:
    kind = bridge.te.dot_product_attention.require()
    fused = kind.is_fused
    patch.setattr(kind, "is_fused", lambda layer, q, k: q.shape[2] == k.shape[2] and fused(layer, q, k))


REFUSAL = Refusal("te", "planted", "it does not want to")
BY_TE: dict[str, tuple[Plant, set[str]]] = {
    "fallback": (
        putting(bridge.Attention, "_why_not_te", lambda layer, query: REFUSAL),
        {"attention.fp32.*.backend"},
    ),
    "grouped-queries-unfused": (unfused_groups, {"bf16.gqa4.d64.odd.kernel.backend"}),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "named"), BY_TE.values(), ids=BY_TE)
def test_a_fault_of_the_path_by_te_is_seen(plant: Plant, named: set[str]) -> None:
    check_caught(new_bench("attention", "te"), whole, plant, named)


OTHERS: dict[str, tuple[Plant, set[str]]] = {
    "false-claim": (
        putting(bridge, "choose", lambda name, candidates: Choice(name, "te", "te", ())), {"attention.*.backend"},
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
