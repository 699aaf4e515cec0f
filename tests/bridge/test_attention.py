"""The attention wrapper: what it computes on each path, what it refuses, and that no fallback is silent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import attention as module
from megacpp_validate.bridge.attention import Attention
from megacpp_validate.bridge.errors import (
    BridgeError,
    MaskConflict,
    NotDivisible,
    UnknownName,
    WrongDtype,
    WrongOption,
    WrongShape,
    WrongTarget,
)
from megacpp_validate.native.attention import reference_attention
from megacpp_validate.probes.references import attend, visible

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


class Calls:
    """The real transformer_engine double, with what its attention was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        kind = module.te.dot_product_attention.require()
        forward = kind.forward

        def record(layer: Any, *args: Any, **kwargs: Any) -> Any:
            assert all(tensor.is_contiguous() for tensor in args), "TE does not look at strides"
            self.seen.append((args, kwargs))
            return forward(layer, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", record)


@pytest.fixture
def calls(te_double: None, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_te_gets_rows_that_are_contiguous_and_copies_only_where_they_are_not(calls: Calls) -> None:
    layer = make()
    rows = [tensor.detach().transpose(1, 2).contiguous() for tensor in tensors(torch.float32)]
    layer(*(tensor.transpose(1, 2) for tensor in rows))  # as from a projection
    assert [tensor.data_ptr() for tensor in calls.seen[-1][0]] == [tensor.data_ptr() for tensor in rows]
    query, key, value = tensors(torch.float32)
    wide = torch.zeros(2, GROUPS, LENGTH, 2 * WIDTH)
    wide[..., ::2] = key.detach()
    out = layer(query, wide[..., ::2], value)
    torch.testing.assert_close(out, reference_attention(query, key, value), rtol=1e-5, atol=1e-5)


def test_the_decision_follows_the_call(calls: Calls) -> None:
    layer, given = make(), tensors(torch.float32)
    taken = []
    for options in ({}, {}, {"window": 5}, {}, {"softcap": 0.5}, {"doc_ids": documents()}, {}):
        layer(*given, **options)
        taken.append(layer.choice.observed)
    assert taken == ["te", "te", "sdpa", "te", "sdpa", "sdpa", "te"]
    layer(*tensors(torch.float64))
    assert layer.choice.observed == "sdpa"
    with pytest.raises(WrongShape):
        layer(*(tensor[..., :8] for tensor in given))


def test_tensor_parallel_heads_are_this_ranks(te_double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, Any] = {}

    class Recorder(torch.nn.Module):
        def __init__(self, **given: Any) -> None:
            super().__init__()
            passed.update(given)

    group = object()
    monkeypatch.setattr(module.te.dot_product_attention, "_found", (Recorder, ""))
    layer = make(tp_size=2, tp_group=group)
    assert (layer.heads, layer.groups) == (2, 1)
    assert {name: passed[name] for name in ("num_attention_heads", "num_gqa_groups", "tp_size", "tp_group")} == {
        "num_attention_heads": HEADS, "num_gqa_groups": GROUPS, "tp_size": 2, "tp_group": group,
    }  # fmt: skip


ROUTED = torch.ones(1, 1, 4, 4, dtype=torch.bool)
PLAIN: dict[str, dict[str, Any]] = {
    "scale": {},
    "window": {"window": 7},
    "window and cap": {"window": 7, "softcap": 0.5},
    "documents and cap": {"doc_ids": documents(), "softcap": 0.5},
    "documents, not causal": {"doc_ids": documents(), "causal": False},
    "cap, not causal": {"softcap": 0.5, "causal": False},
    "blocks": {"block_mask": ROUTED.tril(), "block_size": 5},
    "blocks, not causal": {"block_mask": ROUTED.tril(), "block_size": 5, "causal": False},
}


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_the_native_path_computes_what_was_asked_for(options: dict[str, Any], scale: float | None) -> None:
    given = tensors()
    named = {name: value for name, value in options.items() if name != "softcap"}
    seen = visible(2, HEADS, LENGTH, **named)
    wanted = attend(*given, seen, scale=scale, softcap=options.get("softcap"))
    layer = make(softmax_scale=scale)
    made = layer(*given, **options)
    assert layer.choice.observed == "sdpa"
    torch.testing.assert_close(made, wanted)
    upstream = torch.randn_like(made)
    for one, other in zip(*(torch.autograd.grad(out, given, upstream) for out in (made, wanted)), strict=True):
        torch.testing.assert_close(one, other)


# --- state -------------------------------------------------------------------------------------------------


# --- wrong input -------------------------------------------------------------------------------------------


def wrong(call: Callable[[Attention, Any, Any], Any]) -> Callable[[], Any]:
    def run() -> Any:
        query, key, _ = tensors(torch.float32)
        return call(make(), query, key)

    return run


WRONG: dict[str, tuple[type[BridgeError], Callable[[], Any]]] = {
    "batch": (WrongShape, wrong(lambda layer, q, k: layer(q, k[:1], k[:1]))),
    "value-length": (WrongShape, wrong(lambda layer, q, k: layer(q, k, k[:, :, :8]))),
    "two-devices": (WrongTarget, wrong(lambda layer, q, k: layer(q, k.to("meta"), k))),
    "packed-and-routed": (
        MaskConflict,
        wrong(lambda layer, q, k: layer(q, k, k, doc_ids=documents(), block_mask=ROUTED, block_size=5)),
    ),
    "routed-and-capped": (
        MaskConflict,
        wrong(lambda layer, q, k: layer(q, k, k, softcap=1.0, block_mask=ROUTED, block_size=5)),
    ),
    "blocks-dtype": (WrongDtype, wrong(lambda layer, q, k: layer(q, k, k, block_mask=ROUTED.int(), block_size=5))),
    "documents-elsewhere": (WrongTarget, wrong(lambda layer, q, k: layer(q, k, k, doc_ids=documents().to("meta")))),
    "blocks-elsewhere": (
        WrongTarget,
        wrong(lambda layer, q, k: layer(q, k, k, block_mask=ROUTED.to("meta"), block_size=5)),
    ),
    "cap-nan": (WrongOption, wrong(lambda layer, q, k: layer(q, k, k, softcap=math.nan))),
    "scale-negative": (WrongOption, lambda: make(softmax_scale=-1.0)),
    "size-without-blocks": (WrongOption, wrong(lambda layer, q, k: layer(q, k, k, block_size=5))),
    "groups-by-ranks": (NotDivisible, lambda: make(tp_size=4)),
    "no-groups": (NotDivisible, lambda: make(num_gqa_groups=0)),
    "backend-twice": (UnknownName, lambda: make(backends=("te", "te"))),
    "rank": (WrongShape, wrong(lambda layer, q, k: layer(q[0], k[0], k[0]))),
    "layout": (WrongShape, wrong(lambda layer, q, k: layer(*(x.transpose(1, 2) for x in (q, k, k))))),
    "head-size": (WrongShape, wrong(lambda layer, q, k: layer(*(x[..., :8] for x in (q, k, k))))),
    "groups": (WrongShape, wrong(lambda layer, q, k: layer(q, q, q))),
    "lengths": (WrongShape, wrong(lambda layer, q, k: layer(q, k[:, :, :8], k[:, :, :8]))),
    "no-tokens": (WrongShape, wrong(lambda layer, q, k: layer(q[:, :, :0], k[:, :, :0], k[:, :, :0]))),
    "integers": (WrongDtype, wrong(lambda layer, q, k: layer(q.long(), k.long(), k.long()))),
    "two-dtypes": (WrongDtype, wrong(lambda layer, q, k: layer(q, k, k.bfloat16()))),
    "packed-and-windowed": (MaskConflict, wrong(lambda layer, q, k: layer(q, k, k, doc_ids=documents(), window=4))),
    "window-not-causal": (MaskConflict, wrong(lambda layer, q, k: layer(q, k, k, window=4, causal=False))),
    "window-0": (WrongOption, wrong(lambda layer, q, k: layer(q, k, k, window=0))),
    "cap-0": (WrongOption, wrong(lambda layer, q, k: layer(q, k, k, softcap=0.0))),
    "documents-shape": (WrongShape, wrong(lambda layer, q, k: layer(q, k, k, doc_ids=documents()[:1]))),
    "documents-dtype": (WrongDtype, wrong(lambda layer, q, k: layer(q, k, k, doc_ids=documents().float()))),
    "blocks-shape": (WrongShape, wrong(lambda layer, q, k: layer(q, k, k, block_mask=ROUTED, block_size=4))),
    "blocks-without-size": (WrongOption, wrong(lambda layer, q, k: layer(q, k, k, block_mask=ROUTED))),
    "heads-by-groups": (NotDivisible, lambda: make(num_gqa_groups=3)),
    "heads-by-ranks": (NotDivisible, lambda: make(tp_size=3)),
    "unknown-backend": (UnknownName, lambda: make(backends=("te", "fa2"))),
}


@pytest.mark.parametrize(("error", "call"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_with_the_next_step(error: type[BridgeError], call: Callable[[], Any]) -> None:
    with pytest.raises(error, match="Next step"):
        call()
