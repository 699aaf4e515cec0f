"""Tokens to expert order and back, jagged and padded.

The order of rows is that of Transformer Engine's mask-map permute (pytorch/permutation.py, pytorch/triton/
permutation.py): by expert, and within an expert by token. Chunks are sorted and rows padded as its
moe_sort_chunks_by_index and Fp8Padding do. One thing differs: where a routed token has a probability of exactly 0, TE's
permute writes a row of zeros; here the row is the token, and only its weight is 0.

Sums over experts, forward and backward, are accumulated in fp32 at least and rounded once, as in TE's kernels. On a GPU
their order is not fixed unless torch.use_deterministic_algorithms is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch


def permute(tokens: Any, probs: Any | None, routing_map: Any) -> tuple[Any, Any | None, Any]:
    """Copy each token once for each expert that it goes to, in the order of the experts.

    Args:
        tokens: [T, D], any dtype; one-byte payloads (fp8) travel as they are, without a gradient.
        probs: [T, E] any floating dtype, or None.
        routing_map: [T, E] bool; a row without True is a dropped token, a column without True an idle expert.

    Returns:
        rows [R, D] in the dtype of `tokens`; row_probs [R] in the dtype of `probs`, or None; row_ids int64 [R], the
        token that each row is a copy of. R is the number of True entries.
    """
    experts, row_ids = routing_map.t().nonzero(as_tuple=True)
    rows = _take_rows(tokens, row_ids)
    if probs is None:
        return rows, None, row_ids
    return rows, probs.reshape(-1).index_select(0, row_ids * probs.shape[1] + experts), row_ids


def unpermute(rows: Any, row_ids: Any, *, num_tokens: int, row_probs: Any | None = None) -> Any:
    """Sum the rows of each token, weighted where weights are given.

    Args:
        rows: [R, D].
        row_ids: int64 [R], the token of each row, as `permute` returns it.
        num_tokens: T.
        row_probs: [R], or None for a plain sum.

    Returns:
        [T, D] in the dtype of `rows`; zeros for a token without rows.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if row_probs is not None:
        wide = wide * row_probs.to(wide.dtype).unsqueeze(-1)
    return wide.new_zeros(num_tokens, rows.shape[1]).index_add(0, row_ids, wide).to(rows.dtype)


def pad_rows(rows: Any, rows_per_expert: Sequence[int], align: int) -> tuple[Any, list[int]]:
    """Append rows of zeros to each expert's rows until their number is a multiple of `align`.

    Args:
        rows: [R, D] by expert.
        rows_per_expert: E numbers that sum to R; an expert without rows gets no padding.
        align: what an FP8 GEMM wants: 16, or 32 for MXFP8, 128 for block scaling in DeepGEMM.

    Returns:
        rows [R', D] and the padded numbers of rows.
    """
    padded = padded_counts(rows_per_expert, align)
    if padded == list(rows_per_expert):
        return rows, padded
    return _put_rows(rows, _places(rows_per_expert, _starts(padded), rows.device), sum(padded)), padded


def unpad_rows(rows: Any, rows_per_expert: Sequence[int], align: int) -> Any:
    """Take out what `pad_rows` put in: rows [R', D] and the numbers of rows before padding -> [R, D]."""
    padded = padded_counts(rows_per_expert, align)
    if padded == list(rows_per_expert):
        return rows
    return _take_rows(rows, _places(rows_per_expert, _starts(padded), rows.device))


def padded_counts(rows_per_expert: Sequence[int], align: int) -> list[int]:
    """Each number rounded up to a multiple of `align`."""
    return [-(-count // align) * align for count in rows_per_expert]


def to_padded(rows: Any, rows_per_expert: Sequence[int], capacity: int) -> Any:
    """The padded layout: each expert's rows followed by zeros, [R, D] -> [E, C, D].

    No expert has more rows than `capacity`: what is dropped is decided in the router, by `drop_over_capacity`, so that
    probabilities, losses and rows agree.
    """
    total = len(rows_per_expert) * capacity
    placed = _put_rows(rows, _places(rows_per_expert, range(0, total, capacity), rows.device), total)
    return placed.reshape(-1, capacity, rows.shape[1])


def from_padded(padded: Any, rows_per_expert: Sequence[int]) -> Any:
    """Back from the padded layout: [E, C, D] -> [R, D]."""
    experts, capacity, width = padded.shape
    places = _places(rows_per_expert, range(0, experts * capacity, capacity), padded.device)
    return _take_rows(padded.reshape(-1, width), places)


def sort_chunks(rows: Any, sizes: Sequence[int], order: Sequence[int]) -> Any:
    """Cut rows into chunks and put chunk `order[0]` first, then `order[1]`, and so on.

    Args:
        rows: [R, D], or [R].
        sizes: C numbers of rows that sum to R.
        order: C chunk numbers, each once.

    Returns:
        The same shape and dtype.
    """
    chunks = rows.split(list(sizes))
    return torch.cat([chunks[index] for index in order]) if sizes else rows


def _starts(sizes: Sequence[int]) -> list[int]:
    """The first row of each chunk."""
    return list(accumulate(sizes, initial=0))[:-1]


def _places(sizes: Sequence[int], starts: Sequence[int], device: Any) -> Any:
    """Where each row of jagged chunks lies when chunk c begins at `starts[c]`; int64 [R]."""
    total = sum(sizes)
    shifts = [new - old for new, old in zip(starts, _starts(sizes), strict=True)]
    moved = torch.tensor([shifts, list(sizes)], dtype=torch.int64).to(device)
    return torch.arange(total, device=device) + moved[0].repeat_interleave(moved[1], output_size=total)


def _take_rows(source: Any, indices: Any) -> Any:
    """source[indices]; rows taken more than once get their gradients summed in fp32 at least."""
    if source.dtype.itemsize == 1:
        return source.view(torch.uint8).index_select(0, indices).view(source.dtype)
    return _TakeRows.apply(source, indices)


def _put_rows(rows: Any, places: Any, total: int) -> Any:
    """[total, D] with `rows` at `places` and zeros elsewhere."""
    if rows.dtype.itemsize == 1:
        # There is no index_copy for fp8; bytes of zero are zeros there too. A view as another dtype has no gradient.
        return _copy_rows(rows.view(torch.uint8), places, total).view(rows.dtype)
    return _copy_rows(rows, places, total)


def _copy_rows(rows: Any, places: Any, total: int) -> Any:
    return rows.new_zeros(total, *rows.shape[1:]).index_copy(0, places, rows)


class _TakeRows(torch.autograd.Function):
    """index_select whose backward sums in fp32: that of index_select adds in the dtype of the rows."""

    @staticmethod
    def forward(ctx: Any, source: Any, indices: Any) -> Any:
        ctx.save_for_backward(indices)
        ctx.num_rows = source.shape[0]
        return source.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        (indices,) = ctx.saved_tensors
        return unpermute(grad, indices, num_tokens=ctx.num_rows), None
