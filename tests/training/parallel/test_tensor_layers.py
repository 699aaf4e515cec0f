"""A layer whose heads are split over two ranks computes what one rank computes; each way to get it wrong is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megacpp_validate.bridge.block_weights import BlockShape, shard_native_state
from megacpp_validate.bridge.errors import WeightMismatch
from megacpp_validate.training.errors import WrongSize
from megacpp_validate.training.first_weights import build_layer, first_weights
from megacpp_validate.training.parallel.plan import ParallelPlan, Spread
from megacpp_validate.training.parallel.tensor_weights import (
    cut_state,
    join_states,
    mark_shares,
    plan_cuts,
    share_parameters,
)
from tests.training.parallel.gloo_ranks import on_ranks
from tests.training.parallel.tensor_layer_run import PLAIN, SIZE, everything_on_a_rank

pytestmark = pytest.mark.thorough

LAYERS = tuple(f"{letter}{sequence_parallel}" for letter in "AMR" for sequence_parallel in (1, 0))
# Native weights that hold what has a part of its gradient on each rank: with sequence parallelism, and without.
OF_DIRECTIONS = {"in_projection.weight", "conv_weight", "conv_bias"}
IN_PARTS = {
    "A1": {"qkv.layer_norm_weight", "mlp.layer_norm_weight"},
    "A0": set(),
    "M1": {"in_projection.layer_norm_weight", *OF_DIRECTIONS},
    "M0": OF_DIRECTIONS,
    "R1": {"in_projection.layer_norm_weight"},
    "R0": set(),
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(2, everything_on_a_rank)


def wrong(off: dict[str, float]) -> set[str]:
    return {name for name, ratio in off.items() if not ratio <= 1}


@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_and_every_gradient_are_those_of_one_rank(ranks: list[dict[str, Any]], layer: str) -> None:
    for rank in ranks:
        assert {"out", "rows"} < rank[layer]["off"].keys()
        assert wrong(rank[layer]["off"]) == set()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_gradient_that_is_not_summed_is_seen(ranks: list[dict[str, Any]], layer: str) -> None:
    for rank in ranks:
        assert wrong(rank[layer]["not summed"]) == IN_PARTS[layer]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_wrong_slice_of_heads_is_seen(ranks: list[dict[str, Any]], layer: str) -> None:
    assert all({"out", "rows"} <= wrong(rank[layer]["wrong slice"]) for rank in ranks)


@pytest.mark.parametrize("layer", ["M1", "M0"])
def test_a_gated_norm_by_a_mean_of_its_own_is_seen(ranks: list[dict[str, Any]], layer: str) -> None:
    for rank in ranks:
        assert {"out", "rows"} <= wrong(rank[layer]["local mean"])
        one_way = wrong(rank[layer]["mean summed forward only"])
        assert "rows" in one_way
        assert "out" not in one_way


def test_gradients_of_rows_that_are_not_summed_are_seen(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert wrong(rank["positions not summed on the way back"]) == {"rows", "in_projection.layer_norm_weight"}


def test_every_parameter_is_a_share_or_whole(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for layer in LAYERS:
            assert not set(rank[layer]["shares"]) & set(rank[layer]["marked"])
            assert rank[layer]["shares"] == ranks[0][layer]["shares"]
        assert rank["M0"]["marked"] == [
            "mixer.directions_conv_bias", "mixer.directions_conv_weight", "mixer.in_directions",
        ]  # fmt: skip
        assert "mixer.in_directions" not in rank["M1"]["shares"]


def test_a_mark_of_transformer_engine_makes_no_share() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.tensor_model_parallel = True  # what it puts on whole weights too
    assert list(share_parameters(layer)) == []
    mark_shares([layer.bias])
    assert [name for name, _ in share_parameters(layer)] == ["bias"]


def test_first_weights_are_the_slices_of_the_whole_layers(ranks: list[dict[str, Any]]) -> None:
    assert all(rank[layer]["joined"] for rank in ranks for layer in LAYERS)


def test_low_precision_moves_through_the_collectives(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["bf16"] for rank in ranks)


def test_what_is_not_by_transformer_engine_says_so(ranks: list[dict[str, Any]]) -> None:
    for layer, part in (("A1", "block"), ("M1", "in_projection")):
        choice = ranks[0][layer]["choices"][part]
        assert (choice.requested, choice.observed) == ("te", "native")
        assert [refusal.code for refusal in choice.refusals] == ["te-unavailable"]


@pytest.mark.parametrize("count", [2, 4])
def test_cuts_of_a_are_the_bridges(count: int) -> None:
    size = replace(SIZE, num_gqa_groups=4)
    whole = first_weights("A", size, PLAIN, seed=1, name="a")
    shape = BlockShape(size.hidden, size.ffn_hidden, size.num_heads, size.num_gqa_groups, size.head_dim, gated=True)
    for rank in range(count):
        mine, wanted = (
            cut_state(whole, plan_cuts("A", size), rank, count),
            shard_native_state(whole, shape, rank, count),
        )
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_shares_that_have_drifted_are_not_joined() -> None:
    whole, cuts = first_weights("M", SIZE, PLAIN, seed=1, name="m"), plan_cuts("M", SIZE)
    shares = [cut_state(whole, cuts, rank, 2) for rank in range(2)]
    shares[1]["conv_bias"][-1] += 1  # of the direction c, which both have
    with pytest.raises(WeightMismatch, match=r"conv_bias of rank 1 differs from that of rank 0"):
        join_states(shares, cuts)
    del shares[1]["skip"]
    with pytest.raises(WeightMismatch, match=r"missing: skip"):
        join_states(shares, cuts)


def test_what_is_not_split_is_refused() -> None:
    plan = ParallelPlan(world=2, tensor_parallel=2)
    with pytest.raises(WrongSize, match="has no tensor group"):
        build_layer("R", SIZE, replace(PLAIN, spread=Spread(plan)), seed=1, name="r")
    with pytest.raises(WrongSize, match="a layer A of attention 'mla' is not split"):
        plan_cuts("A", replace(SIZE, attention="mla", rope_dim=8))
