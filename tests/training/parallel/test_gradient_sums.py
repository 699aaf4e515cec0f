"""Gradients are summed over the ranks that hold parts of them, and the norm of all counts each part once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

from megacpp_validate.training.optimizer import GradientSums, MasterAdamW, Schedule
from tests.training.parallel.gloo_ranks import on_ranks

pytestmark = pytest.mark.thorough

SLACK = 16 * 2.0**-24  # a dozen roundings in fp32 at the most: squares, a sum, a root, and what was given


def norms_of(copies: dict[str, int], names: list[str]) -> dict[str, Any]:
    """Of a gradient of 3 that is whole on both ranks once it is summed, and of one of 4 that lies on both in parts."""
    rank = distributed.get_rank()
    weights = {name: nn.Parameter(torch.zeros(1)) for name in ("whole", "part")}
    sums = GradientSums(((frozenset(names), distributed.group.WORLD),), copies)
    optimizer = MasterAdamW(weights.items(), Schedule(1, warm_up=0), sums=sums)
    weights["whole"].grad = torch.tensor([1.0 + rank])
    weights["part"].grad = torch.tensor([8.0**0.5])
    norm = optimizer.take_gradients()
    taken = {name: float(one) for name, one in optimizer.gradients().items()}
    return {"norm": float(norm), "taken": taken, **{part: float(one) for part, one in optimizer.norms_by(str).items()}}


def test_each_part_counts_once() -> None:
    for seen in on_ranks(2, norms_of, {"whole": 2}, ["whole"]):
        assert seen["taken"] == pytest.approx({"whole": 3.0, "part": 8.0**0.5}, rel=SLACK)
        assert (seen["norm"], seen["whole"], seen["part"]) == pytest.approx((5.0, 3.0, 4.0), rel=SLACK)


def test_one_that_is_counted_twice_or_is_not_summed_is_another_norm() -> None:
    for copies, names, norm in (({}, ["whole"], 34**0.5), ({"whole": 2}, [], 18.5**0.5)):
        for seen in on_ranks(2, norms_of, copies, names):
            assert seen["norm"] == pytest.approx(norm, rel=SLACK)
