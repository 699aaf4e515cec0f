"""The A-block's weights: both ways to the bit, and shards of whole heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge import block_weights as weights
from megacpp_validate.bridge import features
from megacpp_validate.bridge.block_weights import BlockShape
from megacpp_validate.bridge.errors import WeightMismatch
from tests.bridge.small_blocks import OFF, TE_NAMES, make, state


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_state_is_cut_by_heads_and_by_halves_of_the_gate(activation: Any) -> None:
    shape, whole = BlockShape(32, 48, 4, 2, 8, activation == "swiglu"), state(activation)
    first, second = (weights.shard_native_state(whole, shape, rank, 2) for rank in range(2))
    assert {name: tuple(weight.shape) for name, weight in first.items()} == shape.shard(2).native_shapes()
    heads = whole["qkv.weight"].view(8, 8, 32)  # four of queries, two of keys, two of values
    assert torch.equal(first["qkv.weight"].view(4, 8, 32), heads[[0, 1, 4, 6]])
    assert torch.equal(second["qkv.weight"].view(4, 8, 32), heads[[2, 3, 5, 7]])
    parts = whole["mlp.fc1_weight"].view(-1, 24, 32)[1::2]  # of each half of a gate
    assert torch.equal(second["mlp.fc1_weight"], parts.reshape(-1, 32))
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
