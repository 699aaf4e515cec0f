"""Permute, padding and chunk sorting against lists, and against what TE's kernels say that they do."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_validate.native.permute import (
    from_padded,
    pad_rows,
    permute,
    sort_chunks,
    to_padded,
    unpad_rows,
    unpermute,
)

maps = some.integers(1, 6).flatmap(
    lambda experts: some.lists(some.lists(some.booleans(), min_size=experts, max_size=experts), min_size=1, max_size=9)
)
sizes_of = some.lists(some.integers(0, 9), min_size=1, max_size=6)


def rows_of(count: int, width: int = 3, dtype: Any = torch.float64) -> Any:
    """Rows that differ in every element, none of them zero."""
    return torch.arange(1, count * width + 1).reshape(count, width).to(dtype)


@settings(deadline=None, max_examples=60)
@given(maps)
def test_rows_are_sorted_by_expert_then_by_token(listed: list[list[bool]]) -> None:
    routing_map = torch.tensor(listed)
    tokens, probs = rows_of(len(listed)), torch.rand(routing_map.shape)
    rows, row_probs, row_ids = permute(tokens, probs, routing_map)
    pairs = [
        (expert, token) for expert in range(len(listed[0])) for token in range(len(listed)) if listed[token][expert]
    ]
    assert row_ids.tolist() == [token for _, token in pairs]
    assert rows.tolist() == [tokens[token].tolist() for _, token in pairs]
    assert row_probs.tolist() == [probs[token, expert].item() for expert, token in pairs]
    assert routing_map.sum(0).tolist() == [sum(row[expert] for row in listed) for expert in range(len(listed[0]))]


@settings(deadline=None, max_examples=60)
@given(maps, some.integers(1, 8))
def test_there_and_back_through_padding(listed: list[list[bool]], align: int) -> None:
    routing_map = torch.tensor(listed)
    tokens, probs = rows_of(len(listed)), torch.rand(routing_map.shape, dtype=torch.float64)
    rows, row_probs, row_ids = permute(tokens, probs, routing_map)
    per_expert = routing_map.sum(0).tolist()
    padded, padded_counts = pad_rows(rows, per_expert, align)
    assert all(count % align == 0 for count in padded_counts)
    back = unpad_rows(padded, per_expert, align)
    merged = unpermute(back, row_ids, num_tokens=len(listed), row_probs=row_probs)
    torch.testing.assert_close(merged, tokens * (probs * routing_map).sum(1, keepdim=True))
    plain = unpermute(back, row_ids, num_tokens=len(listed))
    torch.testing.assert_close(plain, tokens * routing_map.sum(1, keepdim=True))


@settings(deadline=None, max_examples=60)
@given(sizes_of, some.integers(0, 3))
def test_the_padded_layout_and_back(sizes: list[int], spare: int) -> None:
    rows, capacity = rows_of(sum(sizes)), max(sizes) + spare
    padded = to_padded(rows, sizes, capacity)
    assert padded.shape == (len(sizes), capacity, 3)
    for expert, piece in enumerate(rows.split(sizes)):
        assert padded[expert, : sizes[expert]].equal(piece)
        assert not padded[expert, sizes[expert] :].any()
    assert from_padded(padded, sizes).equal(rows)


def chunk_sort_map(sizes: list[int], order: list[int]) -> list[int]:
    """Where each row goes, as TE's _make_chunk_sort_map_kernel computes it."""
    places = []
    for row in range(sum(sizes)):
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        chunk = sum(end <= row for end in ends)
        inside = row - sum(size for size, end in zip(sizes, ends, strict=True) if end <= row)
        ahead = order.index(chunk)
        places.append(sum(sizes[other] for other in order[:ahead]) + inside)
    return places


@settings(deadline=None, max_examples=60)
@given(sizes_of.flatmap(lambda sizes: some.tuples(some.just(sizes), some.permutations(range(len(sizes))))))
def test_chunks_are_sorted_as_in_te(case: tuple[list[int], list[int]]) -> None:
    sizes, order = case
    rows, probs = rows_of(sum(sizes)), torch.rand(sum(sizes))
    moved, moved_probs = sort_chunks(rows, sizes, order), sort_chunks(probs, sizes, order)
    for row, place in enumerate(chunk_sort_map(sizes, order)):
        assert moved[place].equal(rows[row])
        assert moved_probs[place] == probs[row]
    inverse = sorted(range(len(order)), key=lambda index: order[index])
    assert sort_chunks(moved, [sizes[index] for index in order], inverse).equal(rows)


def test_gradients_are_right() -> None:
    torch.manual_seed(0)
    routing_map = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
    per_expert = routing_map.sum(0).tolist()
    assert per_expert[1] == 0
    tokens = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)

    def dispatch(tokens: Any, probs: Any) -> tuple[Any, ...]:
        rows, row_probs, row_ids = permute(tokens, probs, routing_map)
        padded, _ = pad_rows(rows.square(), per_expert, 4)
        boxes = to_padded(unpad_rows(padded, per_expert, 4), per_expert, 3)
        back = from_padded(boxes.sin(), per_expert)
        moved, moved_probs = (sort_chunks(one, per_expert, [2, 0, 3, 1]) for one in (back, row_probs))
        merged = unpermute(back, row_ids, num_tokens=4, row_probs=row_probs)
        return merged, padded, moved, moved_probs

    assert torch.autograd.gradcheck(dispatch, (tokens, probs))
    assert torch.autograd.gradgradcheck(dispatch, (tokens, probs))


class SumDtypes(TorchDispatchMode):
    """Keeps the dtype of every index_add: a CPU's adds up in fp32 whatever its dtype, a GPU's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_add" in str(func):
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_low_precision_rows_are_summed_in_fp32_both_ways() -> None:
    tokens = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    routing_map = torch.ones(3, 512, dtype=torch.bool)
    with SumDtypes() as sums:
        rows, _, row_ids = permute(tokens, None, routing_map)
        merged = unpermute(rows, row_ids, num_tokens=3)
        merged.sum().backward()
    assert sums.seen == [torch.float32, torch.float32]
    # In bf16 a running sum of ones stops at 256, where 256 + 1 rounds to 256.
    assert merged.dtype == torch.bfloat16
    assert merged.eq(512).all()
    assert tokens.grad.eq(512).all()
