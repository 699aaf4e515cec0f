"""The A-block of Transformer Engine's layers is laid out as they gather and scatter; their scales must be shared.

Transformer Engine itself needs GPUs: `python -m tests.training.parallel.te_tensor_ranks` compares it there, and runs on
the CPU here with layers that gather as its do.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.parallel.gloo_ranks import on_ranks
from tests.training.parallel.te_tensor_run import te_form_on_a_rank

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(2, te_form_on_a_rank)


def wrong(off: dict[str, float]) -> set[str]:
    return {name for name, ratio in off.items() if not ratio <= 1}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_it_computes_what_the_whole_native_block_does(ranks: list[dict[str, Any]], sequence_parallel: bool) -> None:
    for rank in ranks:
        assert rank[f"took {sequence_parallel}"] == "te"
        assert wrong(rank[f"off {sequence_parallel}"]) == set()


def test_norms_are_marked_where_they_see_a_part(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["marked True"] == ["block.te.mlp.layer_norm_weight", "block.te.qkv.layer_norm_weight"]
        assert rank["marked False"] == []
        assert len(rank["shares True"]) == len(rank["shares False"]) == 6


def test_a_stream_that_goes_in_batch_first_is_seen(ranks: list[dict[str, Any]]) -> None:
    assert all("rows" in wrong(rank["batch first"]) for rank in ranks)
    assert any("out" in wrong(rank["batch first"]) for rank in ranks)


def test_delayed_scales_must_be_shared_by_the_tensor_group(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert {scope for scope, refused in rank["scales"].items() if refused} == {"delayed alone", "delayed of one"}


def test_what_runs_on_gpus_passes_what_is_right_and_sees_its_planted_fault(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        told = rank["on gpus"]
        assert told["faults"] == []
        assert told["bf16 sp"]["marked"] == rank["marked True"]
        assert told["bf16 tp"]["marked"] == []
    for norm in ("qkv.layer_norm_weight", "mlp.layer_norm_weight"):
        assert max(rank["on gpus"]["bf16 sp"]["not summed"][norm] for rank in ranks) >= 0.5 - 2**-7  # half, in bf16
    assert all("rows: " in " ".join(rank["on gpus, batch first"]) for rank in ranks)
