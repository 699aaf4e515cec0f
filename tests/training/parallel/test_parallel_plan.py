"""Plans that cannot be are refused, all faults at once, each with its reason; the mesh covers every rank once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp_validate.training.parallel.plan import ParallelPlan, RankPlace, WrongPlan, refuse_plan, why_not
from megacpp_validate.training.sizes import SIZES, Size, read_size

pytestmark = pytest.mark.thorough

TINY = SIZES["tiny"]  # AMEAR, 2 heads, 1 group, 4 experts, batch 8, length 32
SMALL = read_size("small", mamba_head_dim=32)  # 8 heads, 2 groups, 8 experts, batch 16, length 512
EIGHT = ParallelPlan(8, 4, 2, 2, True, 2)


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (TINY, ParallelPlan()),
        (TINY, ParallelPlan(2, 2, 2)),
        (TINY, ParallelPlan(4, 4, 2)),
        (TINY, ParallelPlan(4, 4, 4, accumulate=2)),
        (SMALL, EIGHT),
    ],
)
def test_a_plan_that_can_be_has_no_fault(size: Size, plan: ParallelPlan) -> None:
    assert why_not(plan, size, recipe="delayed") == ()
    refuse_plan(plan, size)


@pytest.mark.parametrize(
    ("plan", "changes", "said"),
    [
        (ParallelPlan(3, 3, 3), {"batch": 9}, "num_experts 4 is not divisible by expert_parallel 3"),
        (ParallelPlan(4, 2, 4), {}, "makes 2 rank(s), and the world has 4: ranks would be idle"),
        (ParallelPlan(2, 4, 1), {}, "makes 4 rank(s), and the world has 2: ranks are missing"),
        (ParallelPlan(4, 4, 3), {"num_experts": 3}, "expert_parallel 3 does not divide data 4"),
        (ParallelPlan(2, 2, 2), {"pattern": "AMA"}, "has no layer of experts"),
        (ParallelPlan(2, 1, 1, 2), {}, "num_gqa_groups 1 is not divisible by tensor_parallel 2 (layer A)"),
        (ParallelPlan(4, 1, 1, 4), {}, "num_heads 2 is not divisible by tensor_parallel 4 (layer A)"),
        (ParallelPlan(2, 1, 1, 2), {"ffn_hidden": 33}, "ffn_hidden 33 is not divisible"),
        (ParallelPlan(3, 1, 1, 3), {"pattern": "M"}, "heads of Mamba (2 * hidden / mamba_head_dim) 16 is not"),
        (ParallelPlan(4, 1, 1, 4), {"pattern": "R", "bf16_last": 0}, "recurrent_heads 2 is not divisible"),
        (ParallelPlan(2, 2, 1, 1, True), {}, "and tensor_parallel is 1"),
        (ParallelPlan(2, 1, 1, 2, True), {"length": 33}, "length 33 is not divisible by tensor_parallel 2"),
        (ParallelPlan(64, 1, 1, 64, True), {}, "length 32 over tensor_parallel 64 leaves a rank 0 tokens"),
        (ParallelPlan(16, 16), {}, "leaves a rank 0 tokens: 16 sequences are the least"),
        (ParallelPlan(2, 2, accumulate=8), {}, "leaves a rank 0 tokens"),
        (ParallelPlan(3, 3), {}, "batch 8 is not divisible by data 3 times accumulate 1"),
        (ParallelPlan(True), {}, "world is True, which is no whole number from 1 up"),
        (ParallelPlan(1, 0), {}, "data is 0, which is no whole number from 1 up"),
        (ParallelPlan(sequence_parallel=1), {}, "sequence_parallel is 1, and is True or False"),  # type: ignore[arg-type]
    ],
)
def test_each_fault_is_named(plan: ParallelPlan, changes: dict[str, object], said: str) -> None:
    size = read_size("tiny", **({"bf16_first": 0, "bf16_last": 0} | changes))
    assert any(said in fault for fault in why_not(plan, size)), why_not(plan, size)


def test_all_faults_are_said_at_once_and_no_process_was_started() -> None:
    with pytest.raises(WrongPlan, match="no process was started") as caught:
        refuse_plan(ParallelPlan(7, 5, 3, 3, True), TINY)
    assert len(caught.value.faults) >= 6
    assert all(fault in str(caught.value) for fault in caught.value.faults)


@pytest.mark.parametrize(
    ("tensor", "changes", "recipe", "said"),
    [
        (
            4,
            {"num_heads": 4, "num_gqa_groups": 4},
            "delayed",
            "the MLP of A is 32 wide and 8 on each of 4 tensor ranks",
        ),
        (2, {"num_heads": 2, "num_gqa_groups": 2, "head_dim": 16}, "mxfp8", "the output projection of A is 32 wide"),
        (2, {"num_gqa_groups": 2, "mamba_head_dim": 4}, "delayed", ""),
    ],
)
def test_what_a_split_breaks_for_fp8(tensor: int, changes: dict[str, int], recipe: str, said: str) -> None:
    size = read_size("tiny", **({"ffn_hidden": 32, "pattern": "AAA"} | changes))
    plan = ParallelPlan(tensor, 1, 1, tensor)
    found = why_not(plan, size, recipe=recipe)  # type: ignore[arg-type]
    assert any(said in fault for fault in found) if said else found == ()
    assert why_not(plan, size) == ()
    everything_is_bf16 = replace(size, bf16_first=2, bf16_last=1)
    assert why_not(plan, everything_is_bf16, recipe=recipe) == ()  # type: ignore[arg-type]


def test_a_split_of_m_breaks_nothing_for_fp8() -> None:
    size = read_size("small", pattern="MMM")  # half of its in-projection is 1160 wide; M is native where it is split
    assert why_not(ParallelPlan(2, 1, 1, 2), size, recipe="delayed") == ()


def test_tokens_of_a_rank_fit_the_recipe() -> None:
    size = read_size("tiny", length=20, num_gqa_groups=2, batch=2)
    assert why_not(ParallelPlan(2, 2), size) == ()
    assert "20 tokens a pass" in why_not(ParallelPlan(2, 2), size, recipe="delayed")[0]


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    for groups, members in ((EIGHT.tensor_ranks, 2), (EIGHT.data_ranks, 4), (EIGHT.expert_ranks, 2)):
        seen = {groups(rank) for rank in range(8)}
        assert all(len(group) == members for group in seen)
        assert sorted(rank for group in seen for rank in group) == list(range(8))
        assert all(rank in groups(rank) for rank in range(8))
    assert EIGHT.mesh_shape == (2, 2, 2)
    assert EIGHT.place(5) == RankPlace(1, 0, 1)
    assert EIGHT.expert_ranks(5) == (5, 7)
    assert [list(EIGHT.local_experts(rank, 8)) for rank in EIGHT.expert_ranks(5)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_sequences_and_positions_are_read_once() -> None:
    read = [EIGHT.sequences(rank, 16, part=part) for part in range(2) for rank in EIGHT.data_ranks(0)]
    assert [sequence for some in read for sequence in some] == list(range(16))
    assert EIGHT.sequences(2, 16) == EIGHT.sequences(3, 16)
    assert [position for rank in EIGHT.tensor_ranks(4) for position in EIGHT.positions(rank, 32)] == list(range(32))
    assert ParallelPlan(2, 1, 1, 2).positions(1, 32) == range(32)
