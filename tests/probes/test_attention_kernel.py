"""The kernel by which TE's attention ran: written down, and half precision that runs unfused is a failure."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import attention as bridge  # noqa: E402
from megacpp_validate.probes import attention as probe_module  # noqa: E402
from megacpp_validate.probes.attention import check_kernel  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from tests.probes.planted_numbers import failed, new_bench, run_probe  # noqa: E402

run = partial(run_probe, probe_module)


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
