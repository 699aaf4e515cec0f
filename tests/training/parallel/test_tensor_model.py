"""The hybrid model over two tensor ranks has the losses and gradients of one rank, with and without split positions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.parallel.gloo_ranks import on_ranks
from tests.training.parallel.tensor_model_run import model_on_a_rank

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def ranks() -> list[dict[bool, Any]]:
    return on_ranks(2, model_on_a_rank)


def wrong(off: dict[str, float]) -> set[str]:
    return {name for name, ratio in off.items() if not ratio <= 1}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_losses_and_gradients_are_those_of_one_rank(ranks: list[dict[bool, Any]], sequence_parallel: bool) -> None:
    for rank in ranks:
        told = rank[sequence_parallel]
        assert wrong(told["losses"]) == set()
        assert {"embedding.weight", "norm.weight", "head.weight", "layers.2.router.weight"} <= told["off"].keys()
        assert wrong(told["off"]) == set()
        assert told["alike"]  # bit by bit on both ranks, whatever is no share


def test_what_is_marked_is_what_a_rank_has_a_part_of(ranks: list[dict[bool, Any]]) -> None:
    for rank in ranks:
        assert wrong(rank[True]["not summed"]) == rank[True]["not summed"].keys()
        assert rank[True]["not summed"].keys() <= set(rank[True]["marked"])
        assert wrong(rank[False]["not summed"]) == set()
        assert rank[False]["marked"] == [
            "layers.1.mixer.directions_conv_bias",
            "layers.1.mixer.directions_conv_weight",
            "layers.1.mixer.in_directions",
        ]
