"""Figures of the JIT caches: compiles are summed over processes, and a row measured again replaces its earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.jit_caches import environment_for, measure_parity, row_of, row_of_smoke, write_part


def left_by(rank: int, *kernels: str, **changes: Any) -> dict[str, Any]:
    """What one process leaves; a kernel is NAME or NAME KEY."""
    compiled = [
        {
            "library": "triton", "kernel": kernel.split()[0], "shape": "x:*bf16", "seconds": 0.5, "cached": False,
            "looked_for": " ".join(kernel.split()[1:]),
        }
        for kernel in kernels
    ]  # fmt: skip
    return {
        "rank": rank, "gpu": "NVIDIA H200", "torch": "2.11.0", "started_s": 9.0, "rehearsed_s": 0.0,
        "first_step_s": 4.0 + rank, "steps": [4.0 + rank, 0.2, 0.1], "compiled": compiled, "hits": {"inductor": 2},
        "deep_gemm": {"first_s": 3.0, "second_s": 0.01},
        "unwatched": {"transformer_engine": "in memory"}, **changes,
    }  # fmt: skip


def test_compiles_are_summed_over_processes_and_times_are_the_slowest() -> None:
    row = row_of([left_by(0, "gate", "norm"), left_by(1, "gate")], 2, "cold", "without")
    assert (row["compiled"], row["distinct"], row["more_than_once"]) == ({"triton": 3}, {"triton": 2}, 1)
    assert row["hits"] == {"inductor": 4}
    assert (row["first_step_s"], row["second_step_s"]) == (5.0, 0.2)
    assert row["compile_s"] == 1.5


def test_configurations_of_one_kernel_are_no_kernel_compiled_twice() -> None:
    row = row_of([left_by(0, "permute 0a", "permute 0b"), left_by(1, "permute 0c")], 2, "cold", "with")
    assert (row["distinct"], row["more_than_once"]) == ({"triton": 3}, 0)
    twice = row_of([left_by(0, "permute 0a"), left_by(1, "permute 0a")], 2, "cold", "with")
    assert (twice["distinct"], twice["more_than_once"]) == ({"triton": 1}, 1)


def test_parity_is_read_from_receipts_and_a_red_one_is_no_figure(tmp_path: Path) -> None:
    receipt = {
        "probe": "attention", "outcome": "pass", "reason": "", "commit": "0" * 40, "machine": {"gpu": "NVIDIA H200"},
        "seconds": {"probe": 7.0, "second-use": 1.0, "total": 9.0},
        "jit": {"compiled": [{"library": "fa4"}], "hits": {}},
    }  # fmt: skip
    for state in ("cold", "warm"):
        (tmp_path / state).mkdir()
        (tmp_path / state / "a.json").write_text(json.dumps(receipt))
    asked: Any = SimpleNamespace(receipts=[tmp_path / "cold", tmp_path / "warm"])
    rows = list(measure_parity(asked))
    assert [(row["state"], row["first_use_s"], row["compiled"]) for row in rows] == [
        ("cold", 7.0, {"fa4": 1}), ("prewarmed", 7.0, {"fa4": 1}),
    ]  # fmt: skip
    (tmp_path / "warm" / "a.json").write_text(json.dumps({**receipt, "outcome": "fail", "reason": "out of bounds"}))
    with pytest.raises(SystemExit, match=r"not-run: .* out of bounds"):
        list(measure_parity(asked))


def test_a_row_that_is_measured_again_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    for ranks, processes in ((1, [left_by(0, "gate")]), (4, [left_by(0), left_by(1, "norm")]), (1, [left_by(0)])):
        write_part(tmp_path, "storm", [row_of(processes, ranks, "cold", "with")])
    figures = json.loads((tmp_path / "jit_caches.json").read_text())
    assert [(row["ranks"], row["compiled"]) for row in figures["storm"]] == [(1, {}), (4, {"triton": 1})]
    assert (tmp_path / "jit_caches.md").read_text().count("process(es), cold") == 2


def test_a_smoke_run_is_a_row() -> None:
    rank = {
        "steps": [{"seconds": seconds, "loss": 5.0} for seconds in (2.0, 0.5, 0.5)],
        "goodput": {"phases_ns": {"step": 3 * 10**9}}, "jit": {"compiled": [], "hits": {"triton": 7}, "unwatched": {}},
    }  # fmt: skip
    row = row_of_smoke({"ranks": [rank], "seconds": 20.0})
    assert (row["first_step_s"], row["second_step_s"], row["hits"]) == (2.0, 0.5, {"triton": 7})


def test_every_cache_of_a_run_lies_below_its_root(tmp_path: Path) -> None:
    given = environment_for(tmp_path, "h200", {"OMP_NUM_THREADS": "3"})
    assert given["TRITON_CACHE_DIR"] == str(tmp_path / "sm_90a" / "triton")
    assert given["OMP_NUM_THREADS"] == "3"
