"""The benchmarks of the MoE layer: floors are those of the layer, and faults are reported."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks import expert_scaling, expert_scaling_rank, moe_layer, moe_layer_paths
from benchmarks.moe_layer_paths import SMALL, Case


def test_the_floors_hold_every_product_and_every_weight() -> None:
    case = Case()
    planned = moe_layer.plan_stages(case)
    experts = sum(flop for part, _, flop in planned.values() if part == "GEMM")
    assert experts == case.flop
    weights = 2.0 * case.experts * 3 * case.hidden * case.width
    products = [moved for part, moved, flop in planned.values() if part == "GEMM" and flop]
    assert sum(products) > 3 * weights  # read twice, and their gradients written once
    more = moe_layer.plan_stages(replace(case, experts=2 * case.experts))
    grown = sum(more[stage][1] - planned[stage][1] for stage in planned if planned[stage][0] == "GEMM")
    assert grown == 3 * weights


def test_every_path_is_the_layer_written_out_and_a_fault_is_told() -> None:
    given = moe_layer_paths.make_given(SMALL, "cpu")
    exact = moe_layer_paths.gather_gradients(moe_layer_paths.reference(given), given)
    makers = {
        "jagged": moe_layer_paths.make_jagged,
        "padded": moe_layer_paths.make_padded,
        "bridge": partial(moe_layer_paths.make_bridge, backends=("native",)),
    }
    for path, make in makers.items():
        assert moe_layer.look(make(given), exact, given, "cpu", "bf16")["same"], path
    turned = replace(given, down=given.down.detach().flip(0).requires_grad_())
    told = moe_layer.look(moe_layer_paths.make_jagged(turned), exact, turned, "cpu", "bf16")
    assert not told["same"]
    assert told["errors"]["out"] > moe_layer.BOUNDS["bf16"]


def test_a_path_that_cannot_be_built_is_told_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(given: Any) -> Any:
        raise RuntimeError("no kernel\nfor it")

    monkeypatch.setattr(
        moe_layer_paths, "make_all", lambda given: {"a": partial(broken, given),
                                                    "jagged": partial(moe_layer_paths.make_jagged, given)}
    )  # fmt: skip
    rows = moe_layer.measure(1, "cpu")["paths"]
    assert rows[0] == {"path": "a", "note": "RuntimeError: no kernel for it"}
    assert rows[1]["wall_ms"] > 0


def receipts(*steps: tuple[list[float], list[float]]) -> list[dict[str, Any]]:
    """One receipt a rank: its steps with one GPU and with two."""
    made = {"gpu": "a card", "torch": "2.11", "notes": {}, "traces": {}}
    return [{**made, "rounds": {"native 1": one, "native 2": two}} for one, two in steps]


def test_a_step_is_that_of_the_slowest_rank_and_efficiency_a_ratio_within_a_round() -> None:
    """The clock halves in the second of three rounds: times scatter, ratios do not."""
    made = receipts(([4.0, 8.0, 4.0], [4.0, 8.0, 4.0]), ([3.0, 6.0, 3.0], [5.0, 10.0, 5.0]))
    row = expert_scaling.gather(made, ["native"], 1.0)["rows"][1]
    assert row["step_ms"] == 5.0
    assert row["efficiency"] == pytest.approx(0.8)


def test_the_parts_of_a_traced_step_sum_to_it_and_a_late_rank_makes_the_other_wait() -> None:
    """Microseconds of three steps: two kernels overlap, and between them the device waits for the host."""
    late = {"gemm": [(0.0, 3e3)], "dispatch": [(2e3, 4e3)], "collectives": [(6e3, 7e3)]}
    early = {"gemm": [(-3e3, 3e3)], "dispatch": [(2e3, 4e3)], "collectives": [(4e3, 7e3)]}
    traces = [expert_scaling_rank.split_trace(spans) for spans in (early, late)]
    parts = {"host": 0.0, "dispatch": 1 / 3, "gemm": 2.0, "all_to_all": 1 / 3, "waiting": 2 / 3}
    assert expert_scaling.join_traces(traces, 2) == pytest.approx(parts)
    assert expert_scaling.join_traces(traces[1:], 1) == pytest.approx(
        {**parts, "host": 2 / 3, "gemm": 1.0, "waiting": 0.0}
    )
