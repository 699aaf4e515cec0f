"""The benchmarks of the MoE layer: pages say what figures say, floors are those of the layer, faults are told."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import expert_scaling, moe_layer, moe_layer_paths
from benchmarks.expert_scaling_page import write_page as write_scaling
from benchmarks.moe_layer_page import AIM, write_page
from benchmarks.moe_layer_paths import SMALL, Case

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


def line(path: str, ms: float, gain: float, **more: Any) -> dict[str, Any]:
    errors = dict.fromkeys(moe_layer.PARTS, 0.004)
    return {"path": path, "wall_ms": ms, "device_ms": ms, "walls": [ms, ms], "gain": gain, "waits": 0,
            "peak_mib": 10.0, "errors": errors, "same": True, **more}  # fmt: skip


GOOD: dict[str, Any] = {
    "date": "2026-11-22", "gpu": "a card", "torch": "2.11", "te": "2.20.2", "megatron": "0.16.1", "rounds": 9,
    "case": {"tokens": 8192, "hidden": 2048, "width": 1408, "experts": 64, "top_k": 2, "flop": 8.5e11},
    "rates": {"bytes_s": 4e12, "flop_s": 7e14},
    "bounds": {},
    "paths": [
        line("megatron-core, bf16", 9.0, 1.0, waits=3),
        line("jagged", 3.0, 3.0),
        line("jagged, in a CUDA graph", 2.9, 3.1),
    ],
    "stages": [
        {"stage": "route", "part": "route", "ms": 0.5, "floor_ms": 0.1},
        {"stage": "up", "part": "GEMM", "ms": 0.6, "floor_ms": 0.3},
    ],
}  # fmt: skip


def changed(*way: Any, to: Any) -> dict[str, Any]:
    """The good figures with one of them changed."""
    result = copy.deepcopy(GOOD)
    place: Any = result
    for step in way[:-1]:
        place = place[step]
    place[way[-1]] = to
    return result


def test_aims_that_are_kept_are_said_to_be() -> None:
    page = write_page(GOOD)
    assert page.count("| kept |") == 4
    assert "not kept" not in page
    assert "| **GEMM** | 0.600 | 0.300 | 2.00 x |" in page
    assert "| **all** | 1.100 | 0.400 | 2.75 x |" in page


@pytest.mark.parametrize(
    ("worse", "times"),
    [
        (changed("paths", 1, "gain", to=AIM - 0.01), 1),
        (changed("paths", 2, "gain", to=AIM - 0.01), 1),
        (changed("paths", 1, "waits", to=1), 1),
        (changed("paths", 1, "same", to=False), 1),
        (changed("paths", 0, "same", to=False), 1),
        (changed("paths", 2, to={"path": "jagged, in a CUDA graph", "note": "RuntimeError: no graph"}), 2),
        (changed("paths", 0, to={"path": "megatron-core, bf16", "note": "RuntimeError: no"}), 1),
    ],
    ids=["gain", "gain of the graph", "a wait", "other function", "theirs is another", "no graph", "nothing beside it"],
)
def test_an_aim_that_is_not_kept_is_said_not_to_be(worse: dict[str, Any], times: int) -> None:
    page = write_page(worse)
    assert page.count("**not kept**") == times
    notes = [row["note"] for row in worse["paths"] if "note" in row]
    assert all(f"not run: {note}" in page for note in notes)


@pytest.mark.parametrize(("name", "write"), [("moe_layer", write_page), ("expert_scaling", write_scaling)])
def test_the_page_in_the_docs_is_made_of_the_figures_beside_it(name: str, write: Any) -> None:
    figures = DOCS / f"{name}.json"
    if not figures.is_file():
        pytest.skip(f"not-run: there is no {figures.name}: it is measured on a GPU")
    assert figures.with_suffix(".md").read_text() == write(json.loads(figures.read_text()))


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


@pytest.mark.parametrize(("found", "said"), [(0.8, "| kept |"), (0.79, "**not kept**")])
def test_the_scaling_that_is_aimed_at_is_judged(found: float, said: str) -> None:
    result = expert_scaling.gather(receipts(([4.0], [5.0]), ([4.0], [5.0])), ["native", "te"], 1.0)
    assert "not run" in write_scaling(result)  # nothing ran on four
    result["rows"][1] |= {"gpus": 4, "efficiency": found}
    assert said in write_scaling(result)
