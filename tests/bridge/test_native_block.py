"""The A-block wrapper: its paths agree, its weights move both ways to the bit, its shards are whole heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import errors, features
from megacpp_validate.bridge import native_block as module
from megacpp_validate.bridge.amax_owner import SINGLE_OWNER
from megacpp_validate.bridge.backends import NoBackend
from megacpp_validate.bridge.errors import WeightMismatch
from megacpp_validate.bridge.fp8_scope import PrecisionScope, current_scope, low_precision
from megacpp_validate.bridge.native_block import BlockShape
from megacpp_validate.bridge.te_fp8 import te_recompute, te_state
from megacpp_validate.native.attention import rope_tables
from tests.bridge.small_blocks import OFF, TE_NAMES, Recorder, make, rows, state

# --- paths -------------------------------------------------------------------------------------------------


def low(recipe: str = "current") -> PrecisionScope:
    return low_precision(target="cpu", amax_reduction_group=SINGLE_OWNER, recipe=recipe)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("length", "changes", "taken"),
    [(16, {}, "te"), (12, {}, "native"), (13, {}, "native"), (16, {"ffn_hidden": 56}, "native")],
)
def test_a_recomputation_takes_the_path_of_its_forward_pass(
    te_double: None, use_reentrant: bool, length: int, changes: dict[str, int], taken: str
) -> None:
    """In the backward pass no scope of the bridge is open, and Transformer Engine has its own on."""
    block, paths = make(**changes), []
    block.register_forward_hook(lambda layer, *_: paths.append((layer.choice.observed, te_state()["enabled"])))
    first, second = rows(length=length), rows(length=length)
    block(first)
    assert paths.pop() == ("te", False)
    with low():
        out = te_recompute(block, first, use_reentrant=use_reentrant)
    assert current_scope() is None
    out.sum().backward()
    assert paths == [(taken, True)] * 2
    with low():
        wanted = block(second)
    wanted.sum().backward()
    assert torch.equal(out, wanted)
    assert torch.equal(first.grad, second.grad)


# --- tensor parallelism ------------------------------------------------------------------------------------


@pytest.fixture
def recorded(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that keep what they are made with, in place of TE's."""
    for name in ("layernorm_linear", "dot_product_attention", "linear", "layernorm_mlp"):
        monkeypatch.setattr(getattr(module.te, name), "_found", (Recorder, ""))


def test_tensor_parallelism_is_passed_as_plain_keywords(recorded: None) -> None:
    group = object()
    block, alone = (make(tp_size=ranks, tp_group=group, sequence_parallel=True) for ranks in (2, 1))
    made = {name: getattr(block.te, name).given for name in ("qkv", "attention", "out", "mlp")}
    assert all((given["tp_size"], given["tp_group"]) == (2, group) for given in made.values())
    assert made["qkv"]["parallel_mode"] == "column"
    assert made["out"]["parallel_mode"] == "row"
    assert made["mlp"]["set_parallel_mode"] is True
    assert made["qkv"]["parameters_split"] == {"query": 32, "key": 16, "value": 16}  # TE divides by itself
    assert block.te.heads == (2, 1, 8)
    assert block.shape == BlockShape(32, 24, 2, 1, 8, True)
    assert alone.te.qkv.given["parallel_mode"] is None
    assert alone.te.mlp.given["set_parallel_mode"] is False
    for one, splits in ((block, True), (alone, False)):  # one rank has no positions to share out
        assert [getattr(one.te, name).given["sequence_parallel"] for name in ("qkv", "out", "mlp")] == [splits] * 3
        assert one.te.attention.given["qkv_format"] == ("sbhd" if splits else "bshd")


def test_a_share_without_te_is_refused() -> None:
    with pytest.raises(NoBackend, match="Next step") as refused:
        make(tp_size=2)
    assert "te:" in str(refused.value)


# --- wrong input -------------------------------------------------------------------------------------------

DOCUMENTS = torch.zeros(2, 12, dtype=torch.int32)
WRONG: dict[str, tuple[type[errors.BridgeError], Callable[[], Any]]] = {
    "documents-elsewhere": (
        errors.WrongTarget,
        lambda: make()(rows(), doc_ids=torch.zeros(2, 12, dtype=torch.int64, device="meta")),
    ),
    "rope-lengths": (errors.WrongShape, lambda: make()(rows(), rope=(torch.ones(12, 4), torch.ones(16, 4)))),
    "mlp-by-ranks": (errors.NotDivisible, lambda: make(tp_size=2, ffn_hidden=49)),
    "rank": (errors.WrongShape, lambda: make()(rows()[0])),
    "hidden": (errors.WrongShape, lambda: make()(rows()[..., :16])),
    "no-tokens": (errors.WrongShape, lambda: make()(rows()[:, :0])),
    "dtype": (errors.WrongDtype, lambda: make()(rows().double())),
    "rope-short": (errors.WrongShape, lambda: make()(rows(), rope=rope_tables(8, 8))),
    "rope-wide": (errors.WrongShape, lambda: make()(rows(), rope=rope_tables(12, 16))),
    "documents": (errors.WrongShape, lambda: make()(rows(), doc_ids=DOCUMENTS[:, :6])),
    "packed-and-windowed": (errors.MaskConflict, lambda: make()(rows(), doc_ids=DOCUMENTS, window=4)),
    "heads-by-groups": (errors.NotDivisible, lambda: make(num_gqa_groups=3)),
    "heads-by-ranks": (errors.NotDivisible, lambda: make(tp_size=4)),
}


@pytest.mark.parametrize(("error", "call"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_with_the_next_step(error: type[errors.BridgeError], call: Callable[[], Any]) -> None:
    with pytest.raises(error, match="Next step"):
        call()


def test_the_first_microbatch_reaches_every_layer(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    block, seen = make(), []
    for layer in (block.te.qkv, block.te.out, block.te.mlp):
        forward = layer.forward

        def record(*args: Any, forward: Callable[..., Any] = forward, **keywords: Any) -> Any:
            seen.append(keywords["is_first_microbatch"])
            return forward(*args, **keywords)

        monkeypatch.setattr(layer, "forward", record)
    for first in (True, False, None):
        block(rows(), is_first_microbatch=first)
    assert seen == [True] * 3 + [False] * 3 + [None] * 3


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
