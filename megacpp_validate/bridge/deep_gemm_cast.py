"""Rounding to E4M3 with block scales, in the layouts that DeepGEMM's kernels read: in Triton, and plain torch off CUDA.

DeepGEMM's own casts are written in torch and pass over memory several times; with them a grouped product in FP8 is
slower than one in bf16. Here one pass makes every copy of a tensor. Scales are DeepGEMM's: fp32 amax / 448, not below
1e-4 / 448, and values are multiplied by the rounded reciprocal (deep_gemm/utils/math.py, 0.1.3), bit for bit as on a
GPU, where torch divides by a number as it multiplies by its reciprocal.

| copy               | of                     | scales                   | read by                        |
|--------------------|------------------------|--------------------------|--------------------------------|
| rows               | rows, gradients [P, D] | 1 x 128 along D          | forward, gradient of the rows  |
| columns, "vectors" | the same, transposed   | 1 x 128 along the tokens | gradient of the weights, left  |
| columns, "blocks"  | the same, transposed   | 128 x 128                | gradient of the weights, right |
| weight             | [E, N, K]              | 128 x 128                | forward                        |
| turned weight      | [E, K, N]              | the same, transposed     | gradient of the rows           |

P counts every expert's rows padded to whole tiles of 128, which no kernel may cross: the kernels here write the padding
as zeros while they round, so that no padded copy in bf16 is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch

from ..native.permute import pad_rows
from .vendor import Vendor, explain_plainly

TILE: Final = 128
LARGEST: Final = 448.0
SMALLEST_AMAX: Final = 1e-4
# Odd numbers, as int32: the primes of xxHash32 (https://github.com/Cyan4973/xxHash).
MIX_WORD, MIX_PLACE, MIX_ONCE, MIX_TWICE = (0x9E3779B1 - 2**32, 0x85EBCA77 - 2**32, 0xC2B2AE3D - 2**32, 0x27D4EB2F)
MASKED_TILE: Final = 32  # rows of a program of the masked cast: few rows are the rule there
WARPS: Final = 8

Columns = Literal["none", "vectors", "blocks"]
_COLUMNS: Final[dict[Columns, int]] = {"none": 0, "vectors": 1, "blocks": 2}

TRITON: Final = Vendor(
    "Triton",
    module="triton",
    switch="MEGACPP_DISABLE_TRITON",
    trial="MEGACPP_TRITON_TRIAL_SECONDS",
    explain=explain_plainly("Triton", "pip install the triton that this torch asks for"),
)


@TRITON.entry(required=True)
def kernels() -> Any:
    """The module of Triton kernels."""
    from .kernels import block_casts

    return block_casts


@dataclass(frozen=True)
class Tiles:
    """How rows sorted by expert are cut into tiles of 128 that hold rows of one expert each.

    Attributes:
        counts: rows of each expert.
        padded: the same, in whole tiles.
        table: int32 [5, T] on the device of the rows: for each tile its first row, how many of its rows are real, its
            expert, that expert's first padded row and its padded rows.
    """

    counts: tuple[int, ...]
    padded: tuple[int, ...]
    table: Any

    @property
    def number(self) -> int:
        """T, how many tiles there are."""
        return int(self.table.shape[1])

    @property
    def rows(self) -> int:
        """P, padded rows of all experts."""
        return self.number * TILE

    @property
    def starts(self) -> list[int]:
        """The first padded row of each expert, and the end of the last."""
        ends = [0]
        for count in self.padded:
            ends.append(ends[-1] + count)
        return ends


class RowCast(NamedTuple):
    """Rows [P, D] in E4M3, scales fp32 [P, D / 128] that lie [D / 128, P], and the expert of each row (-1: padding)."""

    values: Any
    scales: Any
    groups: Any


class ColumnCast(NamedTuple):
    """Transposed rows in E4M3: for each expert [D, P_e], one after the other; scales fp32 [T, D] or [T, D / 128]."""

    values: Any
    scales: Any


class QuantizedWeight(NamedTuple):
    """Weights in block-scaled FP8, and the same transposed.

    Attributes:
        values: E4M3 [E, N, K].
        scales: fp32 [E, N / 128, K / 128].
        turned: E4M3 [E, K, N]: a block of 128 x 128 has the same scale when it is transposed, so the values are the
            same, too. None where it was not asked for.
        turned_scales: fp32 [E, K / 128, N / 128].
        prints: int32 [E, N / 128, K / 128, 2]: a fingerprint of the bits of each block when it was rounded. None where
            the copy is not to be renewed.
    """

    values: Any
    scales: Any
    turned: Any
    turned_scales: Any
    prints: Any


def plan_tiles(counts: Sequence[int], device: Any) -> Tiles:
    """Cut rows of experts into tiles; one small copy to the device, which is not waited for."""
    given = torch.tensor(tuple(counts), dtype=torch.int64)
    tiles = (given + TILE - 1) // TILE
    expert = torch.repeat_interleave(torch.arange(len(given)), tiles)
    first = torch.cumsum(tiles, 0) - tiles
    inside = (torch.arange(len(expert)) - first[expert]) * TILE
    start = torch.cumsum(given, 0) - given
    real = torch.clamp(given[expert] - inside, max=TILE)
    table = torch.stack([start[expert] + inside, real, expert, first[expert] * TILE, tiles[expert] * TILE])
    padded = tuple(int(number) * TILE for number in tiles)
    return Tiles(tuple(counts), padded, table.to(torch.int32).to(device, non_blocking=True))


def cast_tokens(
    tokens: Any, tiles: Tiles, *, rows: bool = True, columns: Columns = "none", power_of_two: bool = False
) -> tuple[RowCast | None, ColumnCast | None]:
    """Round rows, or gradients of them, to E4M3, row-wise, column-wise, or both from one read.

    Args:
        tokens: bf16 [R, D] sorted by expert, D whole blocks of 128.
        tiles: of the same numbers of rows.
        rows: whether the row-wise copy is wanted.
        columns: which column-wise copy is wanted.
        power_of_two: round scales up to powers of two, as Blackwell's kernels want them.
    """
    if tokens.device.type != "cuda":
        return cast_tokens_reference(tokens, tiles, rows=rows, columns=columns, power_of_two=power_of_two)
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    number, width = tiles.number, tokens.shape[1]
    new = tokens.new_empty
    row_cast = RowCast(
        new(tiles.rows if rows else 0, width, dtype=torch.float8_e4m3fn),
        new(width // TILE, tiles.rows if rows else 0, dtype=torch.float32),
        new(tiles.rows if rows else 0, dtype=torch.int32),
    )
    per_tile = {"none": 0, "vectors": width, "blocks": width // TILE}[columns]
    column_cast = ColumnCast(
        new(tiles.rows * width if per_tile else 0, dtype=torch.float8_e4m3fn),
        new(number, per_tile, dtype=torch.float32),
    )
    kernels.require().cast_tokens_kernel[(number, width // TILE)](
        tokens, tokens.stride(0), tiles.table, *row_cast, *column_cast, width, number,
        rows=rows, columns=_COLUMNS[columns], power_of_two=power_of_two, num_warps=WARPS,
    )  # fmt: skip
    turned = row_cast._replace(scales=row_cast.scales.t())
    return turned if rows else None, column_cast if per_tile else None


def cast_tokens_reference(
    tokens: Any, tiles: Tiles, *, rows: bool = True, columns: Columns = "none", power_of_two: bool = False
) -> tuple[RowCast | None, ColumnCast | None]:
    """The same in plain torch, wherever the tokens lie: what the kernel is held to."""
    width = tokens.shape[1]
    padded = pad_rows(tokens, tiles.counts, TILE)[0].float()
    row_cast = column_cast = None
    if rows:
        blocks = padded.view(-1, width // TILE, TILE)
        scales = _scale_of(blocks.abs().amax(2), power_of_two)
        first, real, expert = tiles.table[0], tiles.table[1], tiles.table[2]
        inside = torch.arange(TILE, device=first.device)
        groups = torch.where(inside < real[:, None], expert[:, None], -1).reshape(-1).to(torch.int32)
        values = _round(blocks, scales[..., None]).view(-1, width)
        row_cast = RowCast(values, scales.t().contiguous().t(), groups)
    if columns != "none":
        blocks = padded.view(-1, TILE, width)
        amax = blocks.abs().amax(1)
        if columns == "blocks":
            amax = amax.view(-1, width // TILE, TILE).amax(2)
        scales = _scale_of(amax, power_of_two)
        each = scales.repeat_interleave(TILE, 1) if columns == "blocks" else scales
        values = _round(blocks, each[:, None]).view(-1, width).view(torch.uint8)
        flat = torch.cat([piece.t().reshape(-1) for piece in values.split(list(tiles.padded))])
        column_cast = ColumnCast(flat.view(torch.float8_e4m3fn), scales)
    return row_cast, column_cast


def cast_weight(weight: Any, *, turn: bool = True, keep: bool = False, power_of_two: bool = False) -> QuantizedWeight:
    """Round weights [E, N, K] to E4M3 with one scale for each 128 x 128 of an expert.

    Args:
        weight: bf16, N and K whole blocks of 128.
        turn: whether the transposed copy is wanted, too, which the gradient of the rows takes.
        keep: whether `renew_weight` is to make this copy right again later.
        power_of_two: as for `cast_tokens`.
    """
    weight = weight.detach()
    if weight.device.type != "cuda":
        return cast_weight_reference(weight, turn=turn, keep=keep, power_of_two=power_of_two)
    experts, height, width = weight.shape
    new, tall, wide = weight.new_empty, height // TILE, width // TILE
    made = QuantizedWeight(
        new(experts, height, width, dtype=torch.float8_e4m3fn),
        new(experts, tall, wide, dtype=torch.float32),
        new(experts if turn else 0, width, height, dtype=torch.float8_e4m3fn),
        new(experts if turn else 0, wide, tall, dtype=torch.float32),
        new(experts if keep else 0, tall, wide, 2, dtype=torch.int32),
    )
    _launch_weight(weight, made, turn=turn, keep=keep, renew=False, power_of_two=power_of_two)
    made = made if turn else made._replace(turned=None, turned_scales=None)
    return made if keep else made._replace(prints=None)


def renew_weight(kept: QuantizedWeight, weight: Any, *, power_of_two: bool = False) -> None:
    """Round those blocks of a weight [E, N, K] again, in place, whose bits are no longer those that were rounded.

    Every block is read, and its fingerprint compared on the device: no matter who wrote the weight, and whether the
    tensor's version tells (`.data`, a fused optimizer, a collective into a flat buffer, and a replayed CUDA graph do
    not), the copy is right afterwards. It costs one read of the weight instead of a read and two writes.
    """
    weight = weight.detach()
    if weight.device.type == "cuda":
        turn = kept.turned is not None
        _launch_weight(weight, kept, turn=turn, keep=True, renew=True, power_of_two=power_of_two)
        return
    fresh = cast_weight_reference(weight, turn=kept.turned is not None, keep=True, power_of_two=power_of_two)
    changed = (fresh.prints != kept.prints).any(-1)
    wide = changed.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)
    _put(kept.values, fresh.values, wide)
    _put(kept.scales, fresh.scales, changed)
    if kept.turned is not None:
        _put(kept.turned, fresh.turned, wide.transpose(1, 2))
        _put(kept.turned_scales, fresh.turned_scales, changed.transpose(1, 2))
    kept.prints.copy_(fresh.prints)


def cast_weight_reference(
    weight: Any, *, turn: bool = True, keep: bool = False, power_of_two: bool = False
) -> QuantizedWeight:
    """`cast_weight` in plain torch, wherever the weight lies."""
    experts, height, width = weight.shape
    tall, wide = height // TILE, width // TILE
    blocks = weight.float().view(experts, tall, TILE, wide, TILE)
    scales = _scale_of(blocks.abs().amax(dim=(2, 4)), power_of_two)
    values = _round(blocks, scales[:, :, None, :, None]).view(experts, height, width)
    turned = values.view(torch.uint8).transpose(1, 2).contiguous().view(torch.float8_e4m3fn) if turn else None
    turned_scales = scales.transpose(1, 2).contiguous() if turn else None
    return QuantizedWeight(values, scales, turned, turned_scales, fingerprint_reference(weight) if keep else None)


def fingerprint_reference(weight: Any) -> Any:
    """64 bits for each block of 128 x 128 of a bf16 weight [E, N, K]: int32 [E, N / 128, K / 128, 2].

    Each half adds up the words of the block, two values each, mixed with their place by multiplication with odd
    numbers, xor and shift. Mixing maps different words to different ones, so no change of a single word goes unseen;
    of other changes about 2^-64.
    """
    experts, height, width = weight.shape
    half = TILE // 2
    words = weight.contiguous().view(torch.int32).view(experts, height // TILE, TILE, width // TILE, half)
    place = torch.arange(TILE * half, dtype=torch.int32, device=weight.device).view(TILE, 1, half)
    once = words * MIX_WORD + place * MIX_PLACE
    once = (once ^ _shifted(once, 15)) * MIX_ONCE
    once = once ^ _shifted(once, 13)
    twice = once * MIX_TWICE
    twice = twice ^ _shifted(twice, 16)
    return torch.stack([mixed.sum(dim=(2, 4), dtype=torch.int32) for mixed in (once, twice)], dim=-1)


def _shifted(words: Any, by: int) -> Any:
    """Right by so many bits, zeros coming in; torch's own shift brings in the sign."""
    return (words >> by) & ((1 << (32 - by)) - 1)


def cast_masked(tokens: Any, counts: Any, *, power_of_two: bool = False) -> tuple[Any, Any]:
    """Round rows [E, M, D] of which each expert has its first `counts[e]`: E4M3, and a scale for each 1 x 128.

    Args:
        tokens: bf16; rows past an expert's own are not read, and their copies are zeros.
        counts: int32 [E] on the same device, which is not waited for: a CUDA graph may hold the call.
        power_of_two: as for `cast_tokens`.

    Returns:
        Values [E, M', D], and fp32 scales [E, M', D / 128] that lie [E, D / 128, M']. M' is M in whole tiles of 128:
        the kernel stores whole tiles, and where they end in the rows of the next expert, both write there.
    """
    experts, capacity, width = tokens.shape
    padded = -(-capacity // TILE) * TILE
    if tokens.device.type != "cuda":
        return _cast_masked_reference(tokens, counts, padded, power_of_two)
    tokens = tokens.contiguous()
    values = tokens.new_empty(experts, padded, width, dtype=torch.float8_e4m3fn)
    scales = tokens.new_empty(experts, width // TILE, padded, dtype=torch.float32)
    kernels.require().cast_masked_kernel[(experts, padded // MASKED_TILE, width // TILE)](
        tokens, counts, values, scales, capacity, padded, width,
        height=MASKED_TILE, power_of_two=power_of_two, num_warps=WARPS // 2,
    )  # fmt: skip
    return values, scales.transpose(1, 2)


def _cast_masked_reference(tokens: Any, counts: Any, padded: int, power_of_two: bool) -> tuple[Any, Any]:
    experts, capacity, width = tokens.shape
    there = torch.arange(capacity, device=counts.device) < counts[:, None]
    real = torch.where(there[..., None], tokens.float(), 0.0)
    filled = torch.nn.functional.pad(real, (0, 0, 0, padded - capacity))
    blocks = filled.view(experts, padded, width // TILE, TILE)
    scales = _scale_of(blocks.abs().amax(3), power_of_two)
    values = _round(blocks, scales[..., None]).view(experts, padded, width)
    return values, scales.transpose(1, 2).contiguous().transpose(1, 2)


def _launch_weight(
    weight: Any, into: QuantizedWeight, *, turn: bool, keep: bool, renew: bool, power_of_two: bool
) -> None:
    experts, height, width = weight.shape
    packed = weight.contiguous()
    given = [into.values if one is None else one for one in into]  # of a copy that is not made nothing is touched
    kernels.require().cast_weight_kernel[(experts * height // TILE, width // TILE)](
        packed, packed.view(torch.int32), *given, height, width,
        turn=turn, keep=keep, renew=renew, power_of_two=power_of_two, num_warps=WARPS,
    )  # fmt: skip


def _put(into: Any, given: Any, where: Any) -> None:
    """Elements of `given` where it is said; bytes, because FP8 has no `where`."""
    plain = (into.view(torch.uint8), given.view(torch.uint8)) if into.dtype.itemsize == 1 else (into, given)
    plain[0].copy_(torch.where(where, plain[1], plain[0]))


def _scale_of(amax: Any, power_of_two: bool) -> Any:
    scale = amax.clamp(min=SMALLEST_AMAX) * (1.0 / LARGEST)
    if not power_of_two:
        return scale
    bits = scale.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)


def _round(values: Any, scale: Any) -> Any:
    return (values * (1.0 / scale)).to(torch.float8_e4m3fn)
