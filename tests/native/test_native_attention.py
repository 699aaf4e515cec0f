"""Attention against loops over queries in fp64; each comparison is shown to see the fault it is there for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megacpp_validate.native import attention as module
from megacpp_validate.native.attention import attention, reference_attention

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
    "odd": Case(length=33),
    "one group": Case(heads=8, groups=1),
    "head size 128": Case(heads=2, groups=2, length=17, width=128),
    "all see all": Case(options={"causal": False}),
    "scale": Case(options={"scale": 0.7}),
    "packed": Case(docs=PACKED),
    "window": Case(groups=2, options={"window": 3}),
    "window of one": Case(options={"window": 1}),
    "window wider than the keys": Case(options={"window": 99}),
    "packed and window": Case(groups=1, docs=PACKED, options={"window": 2}),
    "soft cap": Case(groups=2, options={"softcap": 0.5}),
    "soft cap, packed and window": Case(groups=2, docs=PACKED, options={"softcap": 0.5, "window": 3, "scale": 0.4}),
    "more keys": Case(groups=2, length=5, keys=12),
    "one query of many keys": Case(groups=2, length=1, keys=12),
    "more keys and window": Case(length=5, keys=12, options={"window": 4}),
    "more keys, all see all": Case(length=5, keys=12, options={"causal": False}),
    "more queries": Case(groups=2, length=12, keys=5, options={"scale": 0.7}),
    "more queries and window": Case(length=12, keys=5, options={"window": 2}),
    "more queries, all see all": Case(length=12, keys=5, options={"causal": False}),
    "no keys": Case(length=3, keys=0),
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


def test_the_fast_path_makes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SDPA can express by itself is left to it: a dense mask would cost it FlashAttention."""

    def refuse(*given: Any, **options: Any) -> Any:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(module, "attention_mask", refuse)
    for name in ("plain", "one group", "all see all", "window wider than the keys", "more queries",
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
        (torch.float32, "one group", False),
        (torch.bfloat16, "window", False),
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
