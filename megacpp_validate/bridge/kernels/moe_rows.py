"""Triton kernels of the jagged expert path: order of the rows, rows to experts and back, gated activation.

Nothing here asks the host for a number of rows. Every sum is taken by one program in a fixed order, in fp32, and
rounded once: results are the same in every run. For products in FP8, rows are padded by expert to whole tiles, and each
kernel that writes such rows also writes them in E4M3 with a scale for every 128 values, or these alone.
"""

# Triton reads the annotations of kernels: it knows its own alone.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from .block_casts import round_values, scale_of


@triton.jit
def _store_cast(value, values, scales, first, width, height, block: tl.constexpr) -> None:
    """Columns of one row from `first` on: E4M3 at `values` [D], a scale for each 128 at `scales`, `height` apart."""
    column = first + tl.arange(0, block)
    parts = tl.reshape(value, (block // 128, 128))
    scale = scale_of(tl.max(tl.abs(parts), axis=1), False)
    rounded = tl.reshape(round_values(parts, scale[:, None]), (block,))
    tl.store(values + column, rounded, mask=column < width)
    part = first // 128 + tl.arange(0, block // 128)
    tl.store(scales + part.to(tl.int64) * height, scale, mask=part * 128 < width)


@triton.jit(do_not_specialize=["total"])
def count_kernel(
    chosen,  # int64 [R]: the expert of each assignment
    counts,  # int32 [blocks, wide]: assignments of each expert in each block
    total,  # R
    wide: tl.constexpr,  # E, up to the next power of two
    block: tl.constexpr,
) -> None:
    """How many assignments of one block go to each expert."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    expert = tl.load(chosen + place, mask=place < total, other=-1).to(tl.int32)
    number = tl.arange(0, wide)
    here = (expert[:, None] == number[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * wide + number, tl.sum(here, axis=0))


@triton.jit(do_not_specialize=["total", "blocks"])
def place_kernel(
    chosen,  # int64 [R]
    counts,  # int32 [blocks, wide], of `count_kernel`
    order,  # int32 [P]: the assignment of each row; not written for padding
    groups,  # int32 [P]: the expert of each row; likewise
    place,  # int32 [R]: the row of each assignment
    ends,  # int32 [E]: where the rows of each expert end
    total,  # R
    blocks,
    experts,  # E
    wide: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,  # blocks that are read at once
    align: tl.constexpr,  # the multiple to which the rows of an expert are padded
) -> None:
    """A stable counting sort: where each assignment of one block goes."""
    own = tl.program_id(0)
    number = tl.arange(0, wide)
    whole = tl.zeros((wide,), dtype=tl.int32)
    before = tl.zeros((wide,), dtype=tl.int32)
    for first in range(0, blocks, chunk):
        other = first + tl.arange(0, chunk)
        seen = tl.load(counts + other[:, None] * wide + number[None, :], mask=other[:, None] < blocks, other=0)
        whole += tl.sum(seen, axis=0)
        before += tl.sum(tl.where(other[:, None] < own, seen, 0), axis=0)
    whole = (whole + align - 1) // align * align
    last = tl.cumsum(whole, axis=0)
    if own == 0:
        tl.store(ends + number, last, mask=number < experts)
    at = own * block + tl.arange(0, block)
    expert = tl.load(chosen + at, mask=at < total, other=-1).to(tl.int32)
    here = (expert[:, None] == number[None, :]).to(tl.int32)
    rank = tl.cumsum(here, axis=0) - here
    row = tl.sum(here * (rank + (last - whole + before)[None, :]), axis=1)
    tl.store(place + at, row, mask=at < total)
    tl.store(order + row, at, mask=at < total)
    tl.store(groups + row, expert, mask=at < total)


@triton.jit(do_not_specialize=["height"])
def gather_kernel(
    source,  # [T, D]
    order,  # int32 [R]; below 0 for padding
    rows,  # [R, D]
    values,  # E4M3 [R, D]
    scales,  # fp32 [D / 128, R]
    width,  # D
    height,  # R
    top_k: tl.constexpr,
    plain: tl.constexpr,  # whether `rows` are written
    cast: tl.constexpr,  # whether `values` and `scales` are
    block: tl.constexpr,
) -> None:
    """One row: a copy of its token; zeros for padding."""
    row = tl.program_id(0).to(tl.int64)
    assignment = tl.load(order + row)
    token = (assignment // top_k).to(tl.int64)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        value = tl.load(source + token * width + column, mask=inside & (assignment >= 0), other=0.0)
        if plain:
            tl.store(rows + row * width + column, value, mask=inside)
        if cast:
            _store_cast(value.to(tl.float32), values + row * width, scales + row, first, width, height, block)


@triton.jit
def combine_kernel(
    rows,  # [R, D]
    place,  # int32 [T, k]
    out,  # [T, D]
    width,  # D
    top_k: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One token: the sum of its rows, in the order of its experts as chosen."""
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        sums = tl.zeros((block,), dtype=tl.float32)
        for slot in tl.static_range(top_k):
            row = tl.load(place + token * top_k + slot).to(tl.int64)
            sums += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * width + column, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["height"])
def gate_kernel(
    up,  # [R, 2F], the gate first
    order,  # int32 [R]; below 0 for padding
    weights,  # fp32 [R]: of each assignment
    inner,  # [R, F]
    values,  # E4M3 [R, F]
    scales,  # fp32 [F / 128, R]
    width,  # F
    height,  # R
    cast: tl.constexpr,  # whether `values` and `scales` are written, instead of `inner`
    block: tl.constexpr,
) -> None:
    """One row: silu(gate) x linear x its weight, rounded once; zeros for padding."""
    row = tl.program_id(0).to(tl.int64)
    assignment = tl.load(order + row)
    there = assignment >= 0
    weight = tl.load(weights + assignment, mask=there, other=0.0)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = (column < width) & there  # what a product left in padding may be no number
        gate = tl.load(up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * linear * weight
        if cast:
            _store_cast(value, values + row * width, scales + row, first, width, height, block)
        else:
            tl.store(inner + row * width + column, value.to(inner.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["height"])
def gate_backward_kernel(
    up,  # [R, 2F]
    order,  # int32 [R]; below 0 for padding
    weights,  # fp32 [R]
    of_inner,  # [R, F]: the gradient of `inner`
    of_up,  # [R, 2F]: that of `up`
    inner,  # [R, F]: once more what the forward made, for the gradient of the next product's weight
    of_weights,  # fp32 [R]
    values,  # E4M3 [R, 2F]: `of_up` for the product that follows
    scales,  # fp32 [2F / 128, R]
    width,  # F
    height,  # R
    cast: tl.constexpr,  # whether `values` and `scales` are written
    block: tl.constexpr,
) -> None:
    """One row: gradients of gate, linear and weight; zeros for padding."""
    row = tl.program_id(0).to(tl.int64)
    assignment = tl.load(order + row)
    there = assignment >= 0
    weight = tl.load(weights + assignment, mask=there, other=0.0)
    sums = tl.zeros((block,), dtype=tl.float32)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        written = column < width
        inside = written & there
        gate = tl.load(up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(of_inner + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        value = silu * linear
        sums += grad * value
        grad = grad * weight
        value = value * weight
        of_gate = grad * linear * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        of_linear = grad * silu
        tl.store(of_up + row * 2 * width + column, of_gate.to(of_up.dtype.element_ty), mask=written)
        tl.store(of_up + row * 2 * width + width + column, of_linear.to(of_up.dtype.element_ty), mask=written)
        tl.store(inner + row * width + column, value.to(inner.dtype.element_ty), mask=written)
        if cast:
            half = values + row * 2 * width
            _store_cast(of_gate, half, scales + row, first, width, height, block)
            below = scales + (width // 128).to(tl.int64) * height + row
            _store_cast(of_linear, half + width, below, first, width, height, block)
    tl.store(of_weights + assignment, tl.sum(sums, axis=0), mask=there)


@triton.jit
def zero_idle_kernel(
    gradient,  # [E, size]
    ends,  # int32 [E]
    size,
    block: tl.constexpr,
) -> None:
    """Zeros for an expert without rows; the others are left alone, unread."""
    expert = tl.program_id(0)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == start:
        step = tl.num_programs(1) * block
        for first in range(tl.program_id(1) * block, size, step):
            column = first + tl.arange(0, block)
            nothing = tl.zeros((block,), dtype=gradient.dtype.element_ty)
            tl.store(gradient + expert.to(tl.int64) * size + column, nothing, mask=column < size)
