"""The probe of attention passes on both paths, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import attention as bridge
from megacpp_validate.bridge.flash_attention import KERNELS
from megacpp_validate.native.attention import attention as plain_attention
from megacpp_validate.probes import attention as probe
from megacpp_validate.probes.attention import check_kernel
from tests.probes.planting import Patch, failed, new_bench, run_probe

run = partial(run_probe, probe)


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
