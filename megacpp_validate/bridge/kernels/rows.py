"""Triton kernels over rows, each of which reads its rows once: residual and RMSNorm, and the rotary embedding."""

# Triton reads the annotations of kernels: it knows its own alone.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@triton.jit
def add_norm_kernel(
    rows,  # [R, D], contiguous
    added,  # the same
    weight,  # [D]
    summed,  # [R, D], contiguous
    normed,  # the same
    eps,
    width: tl.constexpr,  # D
    wide: tl.constexpr,  # the next power of two
) -> None:
    """One row: the sum, rounded, and the norm of what it was rounded to; computed in fp32."""
    corner = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, wide)
    inside = column < width
    one = tl.load(rows + corner + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(added + corner + column, mask=inside, other=0.0).to(tl.float32)
    rounded = (one + other).to(summed.dtype.element_ty)
    tl.store(summed + corner + column, rounded, mask=inside)
    x = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + corner + column, (x * inverse * scale).to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["number", "share"])
def add_norm_backward_kernel(
    summed,  # [R, D], contiguous, as are all of them
    weight,  # [D]
    of_summed,  # gradient of the sum
    of_normed,  # gradient of the norm
    of_rows,  # gradient of rows and of what was added to them
    of_weight,  # fp32 [P, D], a part of each program
    number,  # R
    share,  # rows of a program
    eps,
    width: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """Some rows, in order: d = of_normed * weight, of_rows = (d - x mean(d x)) / rms + of_summed, x the norm alone."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * share
    column = tl.arange(0, wide)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([wide], dtype=tl.float32)
    for step in range(share):
        row = first + step
        there = inside & (row < number)
        at = row * width + column
        x = tl.load(summed + at, mask=there, other=0.0).to(tl.float32)
        down = tl.load(of_normed + at, mask=there, other=0.0).to(tl.float32)
        past = tl.load(of_summed + at, mask=there, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
        x = x * inverse
        total += down * x
        down = down * scale
        back = (down - x * (tl.sum(down * x, axis=0) / width)) * inverse + past
        tl.store(of_rows + at, back.to(of_rows.dtype.element_ty), mask=there)
    tl.store(of_weight + program.to(tl.int64) * width + column, total, mask=inside)


# A compile for every odd length would be one after warm-up: nothing is aligned by the length.
@triton.jit(do_not_specialize=["length", "heads"])
def turn_kernel(
    rows,  # [B, T, H, D], channels side by side
    cos,  # [T, D / 2], channels side by side
    sin,  # the same
    out,  # [B, T, H, D], contiguous
    length,  # T
    heads,  # H
    of_batch,  # strides of rows
    of_token,
    of_head,
    of_cos,  # strides of the tables
    of_sin,
    sign,  # 1.0, or -1.0 for the turn back
    half: tl.constexpr,  # D / 2
    wide: tl.constexpr,  # the next power of two
    group: tl.constexpr,  # heads of a program
) -> None:
    """One token of one sequence, `group` of its heads: computed in fp32, and rounded once."""
    token = tl.program_id(0).to(tl.int64)
    place = token % length
    head = tl.program_id(1) * group + tl.arange(0, group)[:, None]
    channel = tl.arange(0, wide)[None, :]
    inside = (head < heads) & (channel < half)
    table = channel < half
    turn = tl.load(cos + place * of_cos + channel, mask=table, other=0.0).to(tl.float32)
    across = tl.load(sin + place * of_sin + channel, mask=table, other=0.0).to(tl.float32) * sign
    source = rows + (token // length) * of_batch + place * of_token + head * of_head + channel
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * heads + head) * (2 * half) + channel
    tl.store(target, (first * turn - second * across).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * turn + first * across).to(out.dtype.element_ty), mask=inside)
