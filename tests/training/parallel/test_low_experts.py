"""Delayed scaling with experts on two ranks: amax histories move once a step, each over the ranks of its layer."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from tests.training.parallel.gloo_ranks import on_ranks  # noqa: E402
from tests.training.parallel.low_experts_run import STEPS, histories_on_a_rank  # noqa: E402

pytestmark = pytest.mark.thorough

HISTORY = 16
WANTED = list(range(HISTORY - STEPS, HISTORY))  # the newest row last


def wrong_rows(found: dict[str, Any]) -> list[str]:
    """Layers that do not remember one row a step."""
    return [name for name, (rows, _) in found.items() if rows != WANTED]


def test_histories_reach_back_as_many_steps_as_they_are_long() -> None:
    for rank, found in enumerate(on_ranks(4, histories_on_a_rank, "")):
        assert wrong_rows(found) == []
        experts = {name: ranks for name, (_, ranks) in found.items() if ".up." in name or ".down." in name}
        assert set(experts.values()) == {(rank % 2, rank % 2 + 2)}
        assert {ranks for name, (_, ranks) in found.items() if name not in experts} == {(0, 1, 2, 3)}


def test_a_scope_for_each_layer_is_seen() -> None:
    """Planted: what regions are there to spare."""
    for found in on_ranks(2, histories_on_a_rank, "scopes"):
        assert wrong_rows(found) == list(found)
        assert {ranks for name, (_, ranks) in found.items() if ".up." in name} == {()}  # nobody has the same experts
