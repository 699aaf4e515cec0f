"""Every plan lies on its mesh, and every reason against a plan is named at once."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_validate.training import WrongSize
from megacpp_validate.training.parallel.plan import ParallelPlan, Spread, refuse_plan
from megacpp_validate.training.sizes import read_size

SPLIT = {"tensor_parallel": 2}
EIGHT = ParallelPlan(data=4, expert_parallel=2, accumulate=2, **SPLIT)


def test_ranks_share_out_everything_once() -> None:
    ranks = range(EIGHT.world)
    assert EIGHT.mesh_shape == (2, 2, 2)
    places = [EIGHT.place(rank) for rank in ranks]
    assert [(one.expert_data, one.expert, one.tensor) for one in places] == [
        (rank // 4, rank // 2 % 2, rank % 2) for rank in ranks
    ]
    spreads = [Spread(EIGHT, rank) for rank in ranks]
    assert [one.experts(8) for one in spreads] == [range(rank // 2 % 2 * 4, rank // 2 % 2 * 4 + 4) for rank in ranks]
    assert [one.positions(32).start for one in spreads] == [0, 16] * 4
    for part in range(2):
        read = [EIGHT.sequences(rank, 16, part=part) for rank in ranks[::2]]
        assert [place for one in read for place in one] == list(range(8 * part, 8 * part + 8))
        assert [EIGHT.sequences(rank, 16, part=part) for rank in ranks[1::2]] == read


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        ({"data": True, "accumulate": 0}, {}, ["data is True", "accumulate is 0"]),
        ({"data": 2, "expert_parallel": 2}, {"num_experts": 3}, ["num_experts 3 is not divisible"]),
        ({"data": 2, "expert_parallel": 2}, {"pattern": "AM"}, ["no layer of experts"]),
        ({"data": 3, "expert_parallel": 2}, {}, ["data 3 is not", "batch 8 is not"]),
        ({"tensor_parallel": 2}, {}, ["num_gqa_groups 1"]),
        ({**SPLIT}, {"attention": "mla", "rope_dim": 8, "num_gqa_groups": 2}, ["latent attention is not split"]),
        ({**SPLIT}, {"trajectory_coefficient": 0.1}, ["neighbouring positions"]),
        ({**SPLIT}, {"length": 31, "lag": 2}, ["length 31"]),
        ({"data": 2, "accumulate": 8}, {}, ["data times accumulate, 16"]),
    ],
)
def test_all_reasons_are_named(plan: dict[str, Any], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(WrongSize) as refused:
        refuse_plan(ParallelPlan(**plan), read_size("tiny", **changes))
    assert all(word in str(refused.value) for word in words), str(refused.value)
