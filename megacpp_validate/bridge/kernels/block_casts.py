"""Triton kernels that round to E4M3 with block scales, in one pass over memory.

One program reads a tile of 128 x 128 values once and writes every copy that is made of it. Bits equal those of
`cast_weight_reference` and `cast_tokens_reference` of bridge/deep_gemm.py, and of DeepGEMM's own casts unless the
largest value of a block is below 1e-4, which DeepGEMM takes in its place. Reciprocals are IEEE's, and
`cvt.rn.satfinite.e4m3x2` rounds to the nearest, ties to even, as torch does.
"""

# Triton reads the annotations of kernels: it knows its own alone.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

TILE = tl.constexpr(128)
ONE_OF_LARGEST = tl.constexpr(1.0 / 448.0)
SMALLEST_AMAX = tl.constexpr(1e-30)


@triton.jit
def scale_of(amax, power_of_two: tl.constexpr) -> Any:
    """fp32 scales of blocks: amax / 448, not below 1e-30 / 448; up to the next power of two where it must be one."""
    scale = tl.maximum(amax, SMALLEST_AMAX) * ONE_OF_LARGEST
    if power_of_two:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _all_alike(amax) -> Any:
    """The largest of some values in the place of each.

    Not a splat of that one: of a splat the compiler knows that it is cheap in any layout, and then rounds a tile twice,
    once for each layout that it is stored in, instead of moving the rounded bytes.
    """
    return tl.maximum(amax, tl.max(amax, axis=0))


@triton.jit
def round_values(values, scale) -> Any:
    """E4M3 of values / scale, made as DeepGEMM makes it: times the rounded reciprocal."""
    return (values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)).to(tl.float8e4nv)


@triton.jit
def cast_tokens_kernel(
    source,  # bf16 [R, D], by expert
    stride,  # of its rows
    tiles,  # int32 [5, T]: first row in the source, real rows, expert, its first padded row, its padded rows
    values,  # E4M3 [P, D]
    scales,  # fp32 [D / 128, P]
    groups,  # int32 [P]: the expert, -1 for padding
    turned,  # E4M3, for each expert [D, P_e], one after the other
    turned_scales,  # fp32 [T, D] or [T, D / 128]
    width,  # D
    number,  # T
    rows: tl.constexpr,
    columns: tl.constexpr,  # 0 none, 1 a scale for each 128 x 1 tokens, 2 one for each 128 x 128
    power_of_two: tl.constexpr,
) -> None:
    """A tile of 128 rows by 128 features: `deep_gemm.cast_tokens`."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    first = tl.load(tiles + tile)
    real = tl.load(tiles + number + tile)
    row = tl.arange(0, TILE)
    column = tl.arange(0, TILE)
    there = row < real
    # Where a tile begins needs 64 bits, where a value lies in it 32: registers decide how many tiles are in flight.
    corner = source + first.to(tl.int64) * stride + block * TILE
    x = tl.load(corner + (row[:, None] * stride + column[None, :]), mask=there[:, None], other=0.0).to(tl.float32)
    size = tl.abs(x)
    if rows:
        scale = scale_of(tl.max(size, axis=1), power_of_two)
        corner = values + (tile * TILE).to(tl.int64) * width + block * TILE
        tl.store(corner + (row[:, None] * width + column[None, :]), round_values(x, scale[:, None]))
        tl.store(scales + (block * number + tile).to(tl.int64) * TILE + row, scale)
        if block == 0:
            expert = tl.load(tiles + 2 * number + tile)
            tl.store(groups + tile * TILE + row, tl.where(there, expert, -1))
    if columns:
        # Said, because the compiler cannot see it in memory: without it the transposed bytes are stored one by one.
        start = tl.multiple_of(tl.load(tiles + 3 * number + tile), TILE)
        padded = tl.multiple_of(tl.load(tiles + 4 * number + tile), TILE)
        amax = tl.max(size, axis=0)
        if columns == 2:
            amax = _all_alike(amax)
        scale = scale_of(amax, power_of_two)
        if columns == 2:
            tl.store(turned_scales + tile * (width // TILE) + block, tl.max(scale, axis=0))
        else:
            tl.store(turned_scales + tile.to(tl.int64) * width + block * TILE + column, scale)
        across = tl.trans(round_values(x, scale[None, :]))
        corner = turned + start.to(tl.int64) * width + (block * TILE).to(tl.int64) * padded + (tile * TILE - start)
        tl.store(corner + (column[:, None] * padded + row[None, :]), across)


@triton.jit
def cast_weight_kernel(
    weight,  # bf16 [E * N, K]
    values,  # E4M3 [E * N, K]
    scales,  # fp32 [E * N / 128, K / 128]
    turned,  # E4M3 [E, K, N]
    turned_scales,  # fp32 [E, K / 128, N / 128]
    height,  # N
    width,  # K
    turn: tl.constexpr,
    power_of_two: tl.constexpr,
) -> None:
    """A block of 128 x 128 of an expert's weight: `deep_gemm.cast_weight`."""
    tall = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.arange(0, TILE)
    corner = (tall * TILE).to(tl.int64) * width + block * TILE
    inside = row[:, None] * width + tl.arange(0, TILE)[None, :]
    x = tl.load(weight + corner + inside).to(tl.float32)
    size = tl.abs(x)
    scale = scale_of(_all_alike(tl.max(size, axis=1)), power_of_two)
    tl.store(values + corner + inside, round_values(x, scale[:, None]))
    tl.store(scales + tall * (width // TILE) + block, tl.max(scale, axis=0))
    if turn:
        expert = tall // (height // TILE)
        down = tall % (height // TILE)
        across = turned + expert.to(tl.int64) * height * width + (block * TILE).to(tl.int64) * height + down * TILE
        # Rounded once more, from the same scale: where the bytes of the first are stored both ways, the PTX that
        # Triton 3.6.0 makes has halves of registers undefined, and on an H200 the transposed bytes were wrong.
        again = round_values(x, scale_of(_all_alike(tl.max(size, axis=0)), power_of_two)[None, :])
        tl.store(across + (row[:, None] * height + tl.arange(0, TILE)[None, :]), tl.trans(again))
        place = (expert * (width // TILE) + block) * (height // TILE) + down
        tl.store(turned_scales + place, tl.max(scale, axis=0))
