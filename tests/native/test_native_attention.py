"""Attention against loops over queries in fp64; each comparison is shown to see the fault it is there for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.native import attention as module
from megacpp_validate.native.attention import attention, attention_mask, reference_attention
from megacpp_validate.probes.bounds import Roundings, compare

PATHS = [attention, reference_attention]


@dataclass(frozen=True)
class Case:
    """One shape with its options."""

    heads: int = 4
    groups: int = 4
    length: int = 9
    keys: int | None = None
    width: int = 8
    docs: tuple[tuple[int, ...], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def doc_ids(self) -> Any:
        return torch.tensor(self.docs) if self.docs else None

    def arguments(self) -> dict[str, Any]:
        return {**self.options, **({"doc_ids": self.doc_ids()} if self.docs else {})}

    def tensors(self, dtype: Any = torch.float64, seed: int = 0) -> list[Any]:
        """Query, key, value and the gradient that comes from above."""
        source = torch.Generator().manual_seed(seed)
        keys = self.length if self.keys is None else self.keys
        shapes = [(self.heads, self.length), (self.groups, keys), (self.groups, keys), (self.heads, self.length)]
        return [
            torch.randn(2, heads, length, self.width, generator=source, dtype=torch.float64).to(dtype)
            for heads, length in shapes
        ]


PACKED = ((0, 0, 0, 1, 1, 1, 1, 2, 2), (5, 5, 5, 5, 5, 5, 5, 5, 3))
CASES = {
    "plain": Case(),
    "one token": Case(length=1),
    "odd": Case(length=33),
    "one group": Case(heads=8, groups=1),
    "four groups": Case(heads=8, groups=4),
    "eight groups": Case(heads=8, groups=8),
    "head size 64": Case(heads=2, groups=1, length=17, width=64),
    "head size 128": Case(heads=2, groups=2, length=17, width=128),
    "all see all": Case(options={"causal": False}),
    "scale": Case(options={"scale": 0.7}),
    "packed": Case(docs=PACKED),
    "packed, all see all": Case(docs=PACKED, options={"causal": False}),
    "window": Case(groups=2, options={"window": 3}),
    "window of one": Case(options={"window": 1}),
    "window one short of the keys": Case(options={"window": 8}),
    "window wider than the keys": Case(options={"window": 99}),
    "packed and window": Case(groups=1, docs=PACKED, options={"window": 2}),
    "soft cap": Case(groups=2, options={"softcap": 0.5}),
    "soft cap, packed and window": Case(groups=2, docs=PACKED, options={"softcap": 0.5, "window": 3, "scale": 0.4}),
    "more keys": Case(groups=2, length=5, keys=12),
    "two queries of many keys": Case(length=2, keys=12),
    "one query of many keys": Case(groups=2, length=1, keys=12),
    "more keys and window": Case(length=5, keys=12, options={"window": 4}),
    "more keys, all see all": Case(length=5, keys=12, options={"causal": False}),
    "more queries": Case(groups=2, length=12, keys=5, options={"scale": 0.7}),
    "more queries and window": Case(length=12, keys=5, options={"window": 2}),
    "more queries and soft cap": Case(length=12, keys=5, options={"softcap": 0.5}),
    "more queries, all see all": Case(length=12, keys=5, options={"causal": False}),
    "no keys": Case(length=3, keys=0),
    "no keys, all see all": Case(length=3, keys=0, options={"causal": False}),
    "no queries": Case(length=0, keys=4),
}


def sees(
    row: int, column: int, length: int, keys: int, causal: bool = True, docs: Any = None, window: int | None = None
) -> bool:
    """Whether query `row` sees key `column`: the definition, one pair at a time."""
    at = row + keys - length
    if causal and column > at:
        return False
    if window is not None and column <= at - window:
        return False
    return docs is None or docs[row] == docs[column]


def by_loops(query: Any, key: Any, value: Any, case: Case) -> Any:
    """One query at a time, over the list of keys that it sees."""
    options = case.options
    causal, window, cap = options.get("causal", True), options.get("window"), options.get("softcap")
    scale = options.get("scale") or 1 / math.sqrt(case.width)
    length, keys, out = query.shape[2], key.shape[2], []
    for batch in range(query.shape[0]):
        docs = case.docs[batch] if case.docs else None
        for head in range(case.heads):
            group = head // (case.heads // case.groups)
            for row in range(length):
                seen = [at for at in range(keys) if sees(row, at, length, keys, causal, docs, window)]
                if not seen:
                    out.append(0.0 * query[batch, head, row])
                    continue
                scores = torch.stack([query[batch, head, row].dot(key[batch, group, at]) * scale for at in seen])
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                raised = torch.exp(scores - scores.max())
                weights = raised / raised.sum()
                out.append(sum(weight * value[batch, group, at] for weight, at in zip(weights, seen, strict=True)))
    return torch.stack(out).reshape(query.shape) if out else query.clone()


def run(path: Callable[..., Any], tensors: list[Any], **arguments: Any) -> list[Any]:
    """Output and the three gradients."""
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in tensors[:3])
    out = path(query, key, value, **arguments)
    return [out, *torch.autograd.grad(out, (query, key, value), tensors[3], materialize_grads=True)]


@pytest.fixture(scope="module")
def looped() -> dict[str, list[Any]]:
    """Output and gradients of every case by loops, in fp64."""
    return {
        name: run(lambda *given, case=case: by_loops(*given, case=case), case.tensors()) for name, case in CASES.items()
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_loops_forward_and_backward(
    name: str, path: Callable[..., Any], looped: dict[str, list[Any]]
) -> None:
    case = CASES[name]
    seen = run(path, case.tensors(), **case.arguments())
    for what, one, other in zip(("out", "query", "key", "value"), seen, looped[name], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["packed and window", "soft cap", "more queries", "more keys and window"])
def test_gradients_by_differences(name: str, path: Callable[..., Any]) -> None:
    case = CASES[name]
    small = Case(2, 1, case.length, case.keys, 2, case.docs, case.options)
    given = [tensor.requires_grad_() for tensor in small.tensors()[:3]]
    assert torch.autograd.gradcheck(lambda *three: path(*three, **small.arguments()), given, fast_mode=True)


LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def low_precision(name: str, tensor: str, case: Case) -> Roundings:
    """What is rounded on the way to the output, or to the gradient of an input.

    Weights and result; for what goes through the scores, also their gradient and the output that it subtracts; for a
    group that several heads share, also each head's part before they are summed.
    """
    scores = tensor in ("query", "key")
    shared = tensor in ("key", "value") and case.groups < case.heads
    return Roundings(
        ((name, 2 + 2 * scores + shared),),
        max(case.width, case.length),
    )


LOW_CASES = {
    "plain": Case(heads=4, groups=4, length=65, width=64),
    "one group": Case(heads=8, groups=1, length=33, width=64),
    "four groups": Case(heads=8, groups=4, length=33, width=128),
    "packed and window": Case(heads=4, groups=2, docs=((0,) * 20 + (1,) * 45, (0,) * 65), length=65, width=64,
                              options={"window": 16}),
    "soft cap": Case(heads=4, groups=2, length=65, width=64, options={"softcap": 2.0}),
    "more queries": Case(heads=2, groups=2, length=40, keys=33, width=64),
}  # fmt: skip


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", LOW_CASES)
def test_low_precision_lies_within_its_roundings(name: str, dtype: str) -> None:
    case = LOW_CASES[name]
    tensors = case.tensors(LOW[dtype], seed=1)
    seen = run(attention, tensors, **case.arguments())
    wanted = run(reference_attention, [tensor.double() for tensor in tensors], **case.arguments())
    for what, one, other in zip(("out", "query", "key", "value"), seen, wanted, strict=True):
        assert one.dtype == LOW[dtype]
        check = compare(what, one, other, roundings=low_precision(dtype, what, case))
        assert check.passed, check


@pytest.mark.parametrize("name", LOW_CASES)
def test_the_reference_rounds_once(name: str) -> None:
    case = LOW_CASES[name]
    tensors = case.tensors(torch.bfloat16, seed=1)[:3]
    seen = reference_attention(*tensors, **case.arguments())
    wanted = reference_attention(*(tensor.double() for tensor in tensors), **case.arguments())
    # Sums of 65 in fp32 are off by 2^-21; a bf16 spacing is 2^-8 wide, so one result in 2^13 rounds the other way.
    assert (seen != wanted.bfloat16()).double().mean() < 1e-3


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "not causal": ("plain", {"causal": False}),
    "another scale": ("plain", {"scale": 1.02 / 8}),
    "scale left out": ("plain", {"scale": 1.0}),
    "a window one short": ("packed and window", {"window": 15}),
    "a window one wide": ("packed and window", {"window": 17}),
    "no window": ("packed and window", {"window": None}),
    "no documents": ("packed and window", {"doc_ids": None}),
    "no soft cap": ("soft cap", {"softcap": None}),
    "another soft cap": ("soft cap", {"softcap": 1.5}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_a_wrong_option(fault: str) -> None:
    name, change = FAULTS[fault]
    assert not agrees(LOW_CASES[name], lambda *given, **options: attention(*given, **{**options, **change}))


@pytest.mark.parametrize("fault", ["groups interleaved", "key of the next position", "value of another head", "late"])
def test_the_comparison_sees_a_wrong_path(fault: str) -> None:
    def wrong(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if fault == "groups interleaved":
            # Query heads dealt out to the groups in turn instead of in neighbours.
            query = query.unflatten(1, (-1, key.shape[1])).transpose(1, 2).flatten(1, 2)
        elif fault == "key of the next position":
            key = key.roll(1, dims=2)
        elif fault == "value of another head":
            value = value.roll(1, dims=1)
        else:
            query = query.roll(1, dims=2)
        return attention(query, key, value, **options)

    assert not agrees(LOW_CASES["four groups"], wrong)


@pytest.mark.parametrize("by", [-1, 1])
def test_the_comparison_sees_a_mask_off_by_one(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = LOW_CASES["packed and window"]
    tensors = case.tensors(torch.bfloat16, seed=1)
    wanted = reference_attention(*(tensor.double() for tensor in tensors[:3]), **case.arguments())
    true_mask = attention_mask
    monkeypatch.setattr(module, "attention_mask", lambda *given, **options: true_mask(*given, **options).roll(by, -1))
    seen = attention(*tensors[:3], **case.arguments())
    assert not compare("out", seen, wanted, roundings=low_precision("bf16", "out", case)).passed


def agrees(case: Case, path: Callable[..., Any]) -> bool:
    """Whether a path in bf16 passes for attention, by the comparison of the low-precision test."""
    tensors = case.tensors(torch.bfloat16, seed=1)
    wanted = reference_attention(*(tensor.double() for tensor in tensors[:3]), **case.arguments())
    seen = path(*tensors[:3], **case.arguments())
    return compare("out", seen, wanted, roundings=low_precision("bf16", "out", case)).passed


@pytest.mark.parametrize("name", ["plain", "one group", "packed and window", "soft cap", "more queries"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_strided_inputs_give_what_contiguous_ones_give(name: str, dtype: Any) -> None:
    case = LOW_CASES[name]
    tensors = case.tensors(dtype)
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors[:3]]
    assert not strided[0].is_contiguous()
    narrow = [torch.cat((tensor, tensor), -1)[..., : case.width] for tensor in tensors[:3]]
    wanted = attention(*tensors[:3], **case.arguments())
    for given_ in (strided, narrow):
        torch.testing.assert_close(attention(*given_, **case.arguments()), wanted)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"softcap": 3.0}])
def test_rows_that_see_nothing_are_zero_with_their_gradients(
    path: Callable[..., Any], dtype: Any, options: dict[str, Any]
) -> None:
    case = Case(heads=2, groups=1, length=7, keys=3)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        out, query, key, value = run(path, case.tensors(dtype), **options)
    assert (out[:, :, :4] == 0).all()
    assert (query[:, :, :4] == 0).all()
    assert (out[:, :, 4:].abs().sum(-1) > 0).all()
    assert all(part.isfinite().all() for part in (out, query, key, value))


def test_large_scores_stay_finite() -> None:
    case = LOW_CASES["plain"]
    query, key, value, _ = case.tensors(torch.float32)
    for path in PATHS:
        assert path(query * 1e3, key * 1e3, value).isfinite().all()


def test_the_fast_path_makes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SDPA can express by itself is left to it: a dense mask would cost it FlashAttention."""

    def refuse(*given: Any, **options: Any) -> Any:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(module, "attention_mask", refuse)
    for name in ("plain", "one token", "one group", "all see all", "window wider than the keys", "more queries",
                 "one query of many keys", "more keys, all see all"):  # fmt: skip
        case = CASES[name]
        attention(*case.tensors(torch.bfloat16)[:3], **case.arguments())
    for name in ("packed", "window", "more keys"):
        case = CASES[name]
        with pytest.raises(AssertionError, match="a mask was made"):
            attention(*case.tensors(torch.bfloat16)[:3], **case.arguments())


@pytest.mark.parametrize(
    ("dtype", "name", "grouped"),
    [
        (torch.bfloat16, "one group", True),
        (torch.float16, "four groups", True),
        (torch.float32, "one group", False),
        (torch.bfloat16, "window", False),
        (torch.bfloat16, "eight groups", False),
    ],
)
def test_groups_reach_the_kernels_that_know_them(
    dtype: Any, name: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, int]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watch(query: Any, key: Any, value: Any, **options: Any) -> Any:
        asked.append((options["enable_gqa"], key.shape[1]))
        return real(query, key, value, **options)

    monkeypatch.setattr(module.functional, "scaled_dot_product_attention", watch)
    case = CASES[name]
    attention(*case.tensors(dtype)[:3], **case.arguments())
    assert asked == [(grouped, case.groups if grouped else case.heads)]


def test_the_reference_does_not_call_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module.functional, "scaled_dot_product_attention")
    reference_attention(*CASES["plain"].tensors()[:3])
    with pytest.raises(AttributeError):
        attention(*CASES["plain"].tensors()[:3])


def test_both_paths_take_the_same_arguments() -> None:
    assert inspect.signature(attention).parameters == inspect.signature(reference_attention).parameters


@given(
    length=st.integers(0, 7),
    more=st.integers(-4, 5),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 9),
    documents=st.none() | st.lists(st.lists(st.integers(-1, 2), min_size=7, max_size=7), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_mask_is_its_definition(
    length: int, more: int, causal: bool, window: int | None, documents: list[list[int]] | None
) -> None:
    keys = length if documents else max(0, length + more)
    window = window if causal else None
    rows = [row[:length] for row in documents] if documents else [None]
    wanted = torch.tensor(
        [[[[sees(t, s, length, keys, causal, docs, window) for s in range(keys)] for t in range(length)]]
         for docs in rows], dtype=torch.bool
    ).reshape(len(rows), 1, length, keys)  # fmt: skip
    ids = torch.tensor(rows).reshape(len(rows), length) if documents else None
    seen = attention_mask(length, keys, causal=causal, doc_ids=ids, window=window)
    assert seen.dtype == torch.bool
    assert seen.dim() == (4 if documents else 2)
    assert torch.equal(seen.expand(wanted.shape), wanted)
