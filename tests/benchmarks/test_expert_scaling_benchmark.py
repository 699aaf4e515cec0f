"""The page of benchmarks/expert_scaling.py says what was found, and what was not run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.expert_scaling_page import write_page


def page_of(*found: tuple[str, int, float]) -> str:
    zeros = {**dict.fromkeys(("step_ms", "low", "high"), 0.0), "trace": {}}
    rows: list[dict[str, Any]] = [
        {"backend": backend, "gpus": gpus, "efficiency": efficiency, **zeros} for backend, gpus, efficiency in found
    ]
    told = dict.fromkeys(("gpu", "torch", "te", "date"), "x")
    return write_page({**told, "ranks": 2, "rounds": 1, "notes": {}, "rows": rows})


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ((("jagged", 1, 1.0), ("jagged", 4, 0.81)), "81% | kept |"),
        ((("jagged", 1, 1.0), ("jagged", 4, 0.79)), "79% | **not kept** |"),
        ((("jagged", 1, 1.0), ("jagged", 4, 0.9), ("jagged", 8, 0.1)), "90% | kept |"),
        ((("jagged", 1, 1.0), ("jagged", 2, 0.5)), "not run on 4: 50% on 2 | not run |"),
        ((("jagged", 1, 1.0),), "not run on 4: nothing was shared out | not run |"),
    ],
)
def test_the_aim_is_of_four_gpus_alone(found: tuple[tuple[str, int, float], ...], line: str) -> None:
    assert f"| jagged experts, 1 to 4 GPUs: at least 80% of linear | {line}" in page_of(*found)


def test_each_way_to_the_experts_has_a_line() -> None:
    page = page_of(("jagged", 1, 1.0), ("te", 1, 1.0), ("jagged", 2, 0.9), ("te", 2, 0.4))
    assert "| te experts, 1 to 4 GPUs: at least 80% of linear | not run on 4: 40% on 2 | not run |" in page
