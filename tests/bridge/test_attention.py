"""The attention wrapper: what it computes on each path, what it refuses, and that no fallback is silent."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import attention as module
from megacpp_validate.bridge import errors
from megacpp_validate.bridge.attention import Attention
from megacpp_validate.bridge.features import read_features
from megacpp_validate.native.attention import attention as native_attention
from tests.bridge.small_blocks import Recorder

HEADS, GROUPS, WIDTH, LENGTH = 4, 2, 16, 20


def make(**changes: Any) -> Attention:
    sizes = {"num_heads": HEADS, "head_dim": WIDTH, "num_gqa_groups": GROUPS, "device": "cpu"}
    return Attention(**{**sizes, **changes})


def tensors(dtype: Any = torch.float64, length: int = LENGTH) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    shapes = (HEADS, GROUPS, GROUPS)
    made = (torch.randn(2, heads, length, WIDTH, dtype=torch.float64).to(dtype) for heads in shapes)
    return tuple(tensor.requires_grad_() for tensor in made)  # type: ignore[return-value]


def documents() -> Any:
    return (torch.arange(LENGTH) // 7).repeat(2, 1)


# --- who takes a call --------------------------------------------------------------------------------------


@pytest.fixture
def calls(te_double: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the attention of the double is called with."""
    seen: list[tuple[Any, ...]] = []
    kind = module.te.dot_product_attention.require()
    forward = kind.forward

    def record(layer: Any, *args: Any, **kwargs: Any) -> Any:
        assert all(tensor.is_contiguous() for tensor in args), "TE does not look at strides"
        seen.append(args)
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", record)
    return seen


def test_te_gets_rows_that_are_contiguous_and_copies_only_where_they_are_not(calls: list[Any]) -> None:
    layer = make()
    rows = [tensor.detach().transpose(1, 2).contiguous() for tensor in tensors(torch.float32)]
    layer(*(tensor.transpose(1, 2) for tensor in rows))  # as from a projection
    assert [tensor.data_ptr() for tensor in calls[-1]] == [tensor.data_ptr() for tensor in rows]
    query, key, value = tensors(torch.float32)
    wide = torch.zeros(2, GROUPS, LENGTH, 2 * WIDTH)
    wide[..., ::2] = key.detach()
    out = layer(query, wide[..., ::2], value)
    torch.testing.assert_close(out, native_attention(query, key, value), rtol=1e-5, atol=1e-5)


def test_the_decision_follows_the_call(calls: list[Any]) -> None:
    layer, given = make(), tensors(torch.float32)
    taken = []
    for options in ({}, {}, {"window": 5}, {}, {"softcap": 0.5}, {"doc_ids": documents()}, {}):
        layer(*given, **options)
        taken.append(layer.choice.observed)
    assert taken == ["te", "te", "sdpa", "te", "sdpa", "sdpa", "te"]
    layer(*tensors(torch.float64))
    assert layer.choice.observed == "sdpa"
    with pytest.raises(errors.WrongShape):
        layer(*(tensor[..., :8] for tensor in given))


def test_a_flag_turns_te_off(te_double: None) -> None:
    layer = make(features=read_features(attention=False))
    layer(*tensors(torch.float32))
    assert layer.choice.refusals[0].code == "flag-off"


def test_tensor_parallel_heads_are_this_ranks(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.te.dot_product_attention, "_found", (Recorder, ""))
    wanted = {"num_attention_heads": HEADS, "num_gqa_groups": GROUPS, "tp_size": 2, "tp_group": object()}
    layer = make(tp_size=2, tp_group=wanted["tp_group"])
    assert (layer.heads, layer.groups) == (2, 1)
    (recorder,) = (part for part in layer.modules() if isinstance(part, Recorder))
    assert recorder.given.items() >= wanted.items()


# --- wrong input -------------------------------------------------------------------------------------------


def given(**options: Any) -> Any:
    return make()(*tensors(torch.float32), **options)


def changed(change: Callable[[Any, Any], Any]) -> Any:
    return make()(*change(*tensors(torch.float32)[:2]))


ROUTED: dict[str, Any] = {"block_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool), "block_size": 5}
OPTIONS = {
    "packed and routed": (errors.MaskConflict, {"doc_ids": documents(), **ROUTED}),
    "routed and capped": (errors.MaskConflict, {"softcap": 1.0, **ROUTED}),
    "packed and windowed": (errors.MaskConflict, {"doc_ids": documents(), "window": 4}),
    "sampled and windowed": (errors.MaskConflict, {"window": 4, "indices": torch.zeros(2, LENGTH, 1).long()}),
    "window, not causal": (errors.MaskConflict, {"window": 4, "causal": False}),
    "window of 0": (errors.WrongOption, {"window": 0}),
    "cap of 0": (errors.WrongOption, {"softcap": 0.0}),
    "cap NaN": (errors.WrongOption, {"softcap": math.nan}),
    "size without blocks": (errors.WrongOption, {"block_size": 5}),
    "blocks without size": (errors.WrongOption, {"block_mask": ROUTED["block_mask"]}),
    "blocks' shape": (errors.WrongShape, {**ROUTED, "block_size": 4}),
    "blocks' dtype": (errors.WrongDtype, {**ROUTED, "block_mask": ROUTED["block_mask"].int()}),
    "blocks elsewhere": (errors.WrongTarget, {**ROUTED, "block_mask": ROUTED["block_mask"].to("meta")}),
    "documents' shape": (errors.WrongShape, {"doc_ids": documents()[:1]}),
    "documents' dtype": (errors.WrongDtype, {"doc_ids": documents().float()}),
    "documents elsewhere": (errors.WrongTarget, {"doc_ids": documents().to("meta")}),
}
INPUTS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "batch": (errors.WrongShape, lambda q, k: (q, k[:1], k[:1])),
    "value's length": (errors.WrongShape, lambda q, k: (q, k, k[:, :, :8])),
    "lengths": (errors.WrongShape, lambda q, k: (q, k[:, :, :8], k[:, :, :8])),
    "no tokens": (errors.WrongShape, lambda q, k: (q[:, :, :0], k[:, :, :0], k[:, :, :0])),
    "rank": (errors.WrongShape, lambda q, k: (q[0], k[0], k[0])),
    "layout": (errors.WrongShape, lambda q, k: (q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))),
    "head size": (errors.WrongShape, lambda q, k: (q[..., :8], k[..., :8], k[..., :8])),
    "groups": (errors.WrongShape, lambda q, k: (q, q, q)),
    "integers": (errors.WrongDtype, lambda q, k: (q.long(), k.long(), k.long())),
    "two dtypes": (errors.WrongDtype, lambda q, k: (q, k, k.bfloat16())),
    "two devices": (errors.WrongTarget, lambda q, k: (q, k.to("meta"), k)),
}
SIZES = {
    "scale": (errors.WrongOption, {"softmax_scale": -1.0}),
    "groups by ranks": (errors.NotDivisible, {"tp_size": 4}),
    "heads by ranks": (errors.NotDivisible, {"tp_size": 3}),
    "heads by groups": (errors.NotDivisible, {"num_gqa_groups": 3}),
    "no groups": (errors.NotDivisible, {"num_gqa_groups": 0}),
    "backend twice": (errors.UnknownName, {"backends": ("te", "te")}),
    "unknown backend": (errors.UnknownName, {"backends": ("te", "fa2")}),
}
WRONG: dict[str, tuple[type[errors.BridgeError], Callable[[], object]]] = {
    **{name: (error, partial(given, **options)) for name, (error, options) in OPTIONS.items()},
    **{name: (error, partial(changed, change)) for name, (error, change) in INPUTS.items()},
    **{name: (error, partial(make, **sizes)) for name, (error, sizes) in SIZES.items()},
}


@pytest.mark.parametrize(("error", "call"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused(error: type[errors.BridgeError], call: Callable[[], object]) -> None:
    with pytest.raises(error, match="Next step"):
        call()
