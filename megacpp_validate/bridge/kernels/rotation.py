"""Triton kernel of the rotary embedding: one pass over the heads, read where the projection left them."""

# Triton reads the annotations of kernels: it knows its own alone.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


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
