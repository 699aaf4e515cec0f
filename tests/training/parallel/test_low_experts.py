"""Delayed scaling with experts on two ranks: amax histories move once a step, each over the ranks of its layer."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from gloo_ranks import on_ranks  # noqa: E402
from low_experts_run import STEPS, histories_on_a_rank  # noqa: E402


def test_histories_reach_back_as_many_steps_as_they_are_long() -> None:
    for found in on_ranks(2, histories_on_a_rank, ""):
        experts = {name: seen for name, seen in found.items() if ".up." in name or ".down." in name}
        rest = {name: seen for name, seen in found.items() if name not in experts}
        assert experts
        assert rest
        assert set(experts.values()) == {(STEPS, ())}  # no other rank holds the same ones
        assert set(rest.values()) == {(STEPS, (0, 1))}
