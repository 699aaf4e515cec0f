"""The probe of MoE dispatch passes on both paths, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import permute as bridge
from megacpp_validate.bridge.backends import Refusal
from megacpp_validate.native import permute as native
from megacpp_validate.probes import permute as probe
from tests.probes.planting import (
    Fault,
    Plant,
    after,
    changing,
    check_caught,
    failed,
    new_bench,
    putting,
    run_probe,
)  # fmt: skip

run = partial(run_probe, probe)


@pytest.mark.parametrize("seed", range(3))
def test_the_native_path_passes(seed: int) -> None:
    bench = run(seed=seed)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
def test_te_passes_and_is_seen() -> None:
    bench = run("te")
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends if "te" in row.observed} == {"te"}


def first(fault: Fault) -> Fault:
    return lambda given: (fault(given[0]), *given[1:])


def unmarked(tensor: Any) -> Any:
    """The same values and no graph of Transformer Engine behind them."""
    return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor


def leaking(gradient: bool) -> Plant:
    """Padding that leaks into the sums, or into their gradient."""

    def make(real: Any) -> Any:
        def unpad(rows: Any, counts: Any, align: int) -> Any:
            taken = real(rows, counts, align)
            leak = rows.nan_to_num().sum(0) - rows.detach().nan_to_num().sum(0) if gradient else 0 * rows.sum(0)
            return taken + leak if taken.is_floating_point() else taken

        return unpad

    return changing(bridge, "unpad_rows", make)


def off_by(number: int) -> Fault:
    def counted(sent: Any) -> Any:
        counts = (sent.rows_per_expert[0] + number, *sent.rows_per_expert[1:])
        return type(sent)(sent.rows, sent.row_probs, counts, sent.tokens_per_expert, sent.row_map)

    return counted


def zero_is_no_padding(real: Any) -> Any:
    return lambda self, payload, probs, kept, count: (
        native.permute(payload, probs, kept) if count else real(self, payload, probs, kept, count)
    )


ON_NATIVE: dict[str, tuple[Plant, set[str]]] = {
    "bytes rounded": (
        after(bridge, "permute", first(lambda rows: rows & 0xFE if rows.dtype == torch.uint8 else rows)),
        {"float8_e4m3fn.jagged.rows"},
    ),
    "padding leaks backward": (leaking(True), {"bf16.aligned.back.grad.rows"}),
    "one more": (after(bridge.Dispatch, "permute", off_by(1)), {"bf16.one-token.counts"}),
    "zero is no padding": (
        changing(bridge.Dispatch, "_native_permute", zero_is_no_padding), {"bf16.zero-probability.rows"},
    ),
}  # fmt: skip
BY_TE: dict[str, tuple[Plant, set[str]]] = {
    "fallback": (
        putting(bridge, "why_not_te", lambda *_: Refusal("te", "planted", "planted")),
        {"bf16.top2.dropped.permute.bf16.top2.dropped.backend", "float8_e4m3fn.jagged.claimed"},
    ),
    "false claim there": (after(bridge, "te_permute", first(unmarked)), {"*backend"}),
}


@pytest.mark.parametrize(("plant", "wanted"), ON_NATIVE.values(), ids=ON_NATIVE)
def test_a_fault_on_the_native_path_is_caught(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("permute"), probe.probe, plant, wanted)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "wanted"), BY_TE.values(), ids=BY_TE)
def test_a_fault_in_what_te_gives_is_caught(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("permute", "te"), probe.probe, plant, wanted)
