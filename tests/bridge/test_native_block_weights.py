"""The A-block's weights: both ways to the bit, and shards of whole heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.bridge import block_weights as weights
from megacpp_validate.bridge import features
from megacpp_validate.bridge.block_weights import BlockShape
from megacpp_validate.bridge.errors import WeightMismatch
from tests.bridge.small_blocks import OFF, TE_NAMES, make, state


@settings(max_examples=40, deadline=None)
@given(
    tp_size=st.sampled_from([1, 2, 4]), per_rank=st.integers(1, 2), share=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([2, 3, 8]), columns=st.integers(1, 5),
)  # fmt: skip
def test_qkv_shares_are_whole_heads_of_each_segment(
    tp_size: int, per_rank: int, share: int, width: int, columns: int
) -> None:
    groups, heads = tp_size * per_rank, tp_size * per_rank * share
    whole = torch.arange((heads + 2 * groups) * width * columns).view(-1, columns)
    shards = [weights.split_qkv(whole, rank, tp_size, heads, groups, width) for rank in range(tp_size)]
    by_head = whole.view(-1, width, columns)
    for rank, shard in enumerate(shards):
        mine = [
            *range(rank * heads // tp_size, (rank + 1) * heads // tp_size),
            *(heads + g for g in range(rank * per_rank, (rank + 1) * per_rank)),
            *(heads + groups + g for g in range(rank * per_rank, (rank + 1) * per_rank)),
        ]
        assert torch.equal(shard.view(-1, width, columns), by_head[mine])
    if tp_size > 1:
        assert not torch.equal(shards[0], whole.chunk(tp_size)[0])


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_state_is_cut_by_heads_and_by_halves_of_the_gate(activation: Any) -> None:
    shape, whole = BlockShape(32, 48, 4, 2, 8, activation == "swiglu"), state(activation)
    first, second = (weights.shard_native_state(whole, shape, rank, 2) for rank in range(2))
    assert {name: tuple(weight.shape) for name, weight in first.items()} == shape.shard(2).native_shapes()
    assert torch.equal(second["qkv.weight"], weights.split_qkv(whole["qkv.weight"], 1, 2, 4, 2, 8))
    up = weights.split_gated(whole["mlp.fc1_weight"], 1, 2) if shape.gated else whole["mlp.fc1_weight"][24:]
    assert torch.equal(second["mlp.fc1_weight"], up)
    for name in ("out.weight", "mlp.fc2_weight"):
        assert torch.equal(torch.cat([first[name], second[name]], 1), whole[name])


def test_checkpoints_do_not_depend_on_extra_state(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make()
    kind = next(base for base in type(block.te.qkv).__mro__ if base.__name__ == "TransformerEngineBaseModule")
    loaded = []
    monkeypatch.setattr(kind, "get_extra_state", lambda layer: torch.ones(2, dtype=torch.uint8), raising=False)
    monkeypatch.setattr(kind, "set_extra_state", lambda layer, given: loaded.append(given.numel()), raising=False)
    kept = block.state_dict()
    assert "te.mlp._extra_state" in kept
    block.load_state_dict({name: value for name, value in kept.items() if not name.endswith("_extra_state")})
    extra = [name for name in kept if name.endswith("_extra_state")]
    assert loaded == [0] * len(extra)  # an empty one, which TE takes for none
    block.load_state_dict(kept)
    assert loaded[len(extra) :] == [2] * len(extra)
    native = make(features=OFF)
    foreign = {"te.qkv._extra_state": torch.ones(2), "native.out._extra_state": torch.ones(2)}
    native.load_state_dict({**native.state_dict(), **foreign})
    with pytest.raises(RuntimeError, match="Missing"):
        native.load_state_dict({name: value for name, value in native.state_dict().items() if "out" not in name})


@pytest.mark.parametrize("path", ["te", "native"])
def test_weights_go_there_and_back_to_the_bit(te_double: None, path: str) -> None:
    block, wanted = make(features=features.PRODUCTION if path == "te" else OFF), state()
    block.load_native_state_dict({**wanted, "qkv._extra_state": None})
    seen = block.native_state_dict()
    assert seen.keys() == wanted.keys()
    assert all(torch.equal(seen[name], weight) for name, weight in wanted.items())


def faulty(**changes: Any) -> dict[str, Any]:
    return {name: weight for name, weight in {**state(), **changes}.items() if weight is not None}


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (faulty(**{"out.weight": None}), "out.weight is missing"),
    "unknown": (faulty(**{"out.bias": torch.zeros(32)}), "out.bias is unknown"),
    "te-names": ({name: torch.zeros(1) for name in TE_NAMES}, "qkv.query_weight is unknown"),
    "shape": (faulty(**{"qkv.weight": torch.zeros(48, 32)}), r"qkv.weight has shape \(48, 32\), wanted \(64, 32\)"),
    "plain-for-gated": (faulty(**{"mlp.fc1_weight": torch.zeros(48, 32)}), "mlp.fc1_weight has shape"),
    "dtype": (faulty(**{"out.weight": torch.zeros(32, 32, dtype=torch.float64)}), "out.weight is torch.float64"),
}


@pytest.mark.parametrize(("wrong", "named"), MISMATCHES.values(), ids=MISMATCHES)
@pytest.mark.parametrize("path", ["te", "native"])
def test_what_does_not_fit_is_refused_whole(te_double: None, path: str, wrong: dict[str, Any], named: str) -> None:
    block = make(features=features.PRODUCTION if path == "te" else OFF)
    before = block.native_state_dict()
    with pytest.raises(WeightMismatch, match=named) as refused:
        block.load_native_state_dict(wrong)
    assert "Next step" in str(refused.value)
    after = block.native_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
