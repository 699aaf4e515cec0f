"""Every page is made of the figures beside it, and reports the aim that a worse figure does not keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bundle, expert_gemm_page, expert_scaling_page, fp8_page, jit_caches_page, moe_layer_page
from benchmarks.fp8_jagged import AIM, BF16, gain
from benchmarks.fp8_jagged import write_page as write_jagged_page
from megacpp_validate.bridge.expert_gemm import why_bf16_is_faster

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
PAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "bundle": bundle.write_page, "expert_gemm": expert_gemm_page.write_page,
    "expert_scaling": expert_scaling_page.write_page, "fp8": fp8_page.write_page,
    "fp8_jagged": write_jagged_page, "jit_caches": jit_caches_page.write_page,
    "moe_layer": moe_layer_page.write_page,
}  # fmt: skip


def read_figures(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((DOCS / f"{name}.json").read_text())
    return figures


def test_jagged_experts_take_fp8_where_it_was_measured_to_be_worth_it() -> None:
    for layer in read_figures("fp8_jagged")["layers"]:
        for passes, path in ((1, "jagged"), (2, "jagged-kept")):
            wins = gain(layer, passes) >= AIM
            assert (why_bf16_is_faster([layer["rows"]], path) is None) is wins, (layer["rows"], path)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_the_figures_beside_it(name: str) -> None:
    assert (DOCS / f"{name}.md").read_text() == PAGES[name](read_figures(name))


NO_GRAPH = {"path": "jagged, in a CUDA graph", "note": "RuntimeError: no graph"}
# Page, where its figures have a row, what is otherwise there, and how many verdicts that changes.
VERDICTS: list[tuple[str, tuple[Any, ...], dict[str, Any], int]] = [
    ("fp8", ("mlp", "rows", 1), {"gain": fp8_page.AIMS["mlp"] - 0.01}, 1),
    ("fp8", ("block", "rows", 1), {"gain": fp8_page.AIMS["block"] - 0.01}, 1),
    ("fp8", ("mlp", "rows", 1), {"over_raw": 1.021}, 1),
    ("fp8", ("block", "rows", 0), {"over_raw": 1.021}, 1),
    ("fp8", ("mlp", "rows", 1), {"side": "bridge, delayed", "recipe": "", "note": "FellBack: native"}, 1),
    ("fp8_jagged", ("layers", -1, "ms"), {BF16: 1.0}, 1),
    ("moe_layer", ("paths", 7), {"gain": moe_layer_page.AIM - 0.01}, 1),
    ("moe_layer", ("paths", 8), {"gain": moe_layer_page.AIM - 0.01}, 1),
    ("moe_layer", ("paths", 7), {"waits": 1}, 1),
    ("moe_layer", ("paths", 7), {"same": False}, 1),
    ("moe_layer", ("paths", 0), {"same": False}, 1),
    ("moe_layer", ("paths", 8), NO_GRAPH, 2),
    ("expert_scaling", ("rows", 1), {"gpus": 4, "efficiency": 0.79}, 1),
    ("expert_scaling", ("rows", 1), {"gpus": 4, "efficiency": 0.81}, 0),
    ("expert_scaling", ("rows", 1), {"gpus": 8, "efficiency": 0.1}, 0),
    ("jit_caches", ("smoke", 2), {"first_step_s": 9.0}, 1),
    ("jit_caches", ("storm", 0), {"more_than_once": 1}, 1),
    ("jit_caches", ("storm", 1), {"compiled": {"triton": 1}}, 1),
    ("jit_caches", ("tasks", 1), {"compiled": 6}, 1),
]


@pytest.mark.parametrize(("name", "way", "changes", "more"), VERDICTS)
def test_an_aim_that_is_not_kept_is_reported(
    name: str, way: tuple[Any, ...], changes: dict[str, Any], more: int
) -> None:
    figures = row = read_figures(name)
    before = PAGES[name](figures).count("**not kept**")
    for key in way:
        row = row[key]
    if "note" in changes:  # a path that did not run has no figures
        row.clear()
    row |= changes
    page = PAGES[name](figures)
    assert page.count("**not kept**") == before + more
    assert f"not run: {changes.get('note', '')}" in page or "note" not in changes
