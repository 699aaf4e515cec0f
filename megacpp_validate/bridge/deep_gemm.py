"""An expert bank's product by DeepGEMM: forward and both gradients in block-scaled FP8.

Importing this module imports nothing of the library and never raises. The library compiles its kernels when they are
first called, about 2 s each, so it wants a CUDA toolkit beside the driver: its own import starts `which nvcc` where
neither CUDA_HOME nor CUDA_PATH is set, and fails with an empty AssertionError where none is found.

What was seen with torch 2.11 on sm_90 (2026-11-21): sgl-deep-gemm 0.1.3 works; 0.1.7 and 0.2.0 load and then refuse
every tensor ("dim == 2 or dim == 3"); 0.2.1 and later do not load. In 0.1.3 there is no k-grouped FP8 kernel (only
`k_grouped_bf16_gemm_tn_contiguous`), the `nn` layouts are refused ("major_b == cute::UMMA::Major::K"), and with the
headers of CUDA 13.0 NVRTC compiles nothing: it is not told of include/cccl, and given that it lacks
`cudaGridDependencySynchronize`. So kernels are compiled by NVCC, and the gradient of the weights is made by the kernels
that there are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch

from ..native.grouped_gemm import grouped_weight_gradient
from ..native.permute import pad_rows
from .backends import Refusal
from .vendor import TRITON, Vendor, explain_plainly

# --- deep gemm ---

DEEP_GEMM: Final = Vendor(
    "DeepGEMM",
    module="deep_gemm",
    switch="MEGACPP_DISABLE_DEEP_GEMM",
    explain=explain_plainly("DeepGEMM", "pip install sgl-deep-gemm==0.1.3, and set CUDA_HOME to a toolkit with nvcc"),
)


@DEEP_GEMM.required_entry
def grouped_fp8_gemm() -> Any:
    """Rows [R, K] x weights [E, N, K]: each with its scales, the group of each row, into bf16 [R, N].

    Since 2026-01-16 (commit 0f5f266) the name without "fp4" is an alias of this kernel, which may go as others went
    in 2.8.0 (`fp8_m_grouped_gemm_nt_masked`); before, there is no other name.
    """
    try:
        from deep_gemm import m_grouped_fp8_fp4_gemm_nt_contiguous as gemm  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from deep_gemm import m_grouped_fp8_gemm_nt_contiguous as gemm
    return gemm


@DEEP_GEMM.required_entry
def fp8_gemm() -> Any:
    """[M, K] x [N, K], each with its scales, into bf16 [M, N]; its names as of the grouped product."""
    try:
        from deep_gemm import fp8_fp4_gemm_nt as gemm
    except ImportError:
        from deep_gemm import fp8_gemm_nt as gemm
    return gemm


# The multiple to which each group's rows are padded; 128 on sm_90.
rows_alignment: Final = DEEP_GEMM.attribute("get_mk_alignment_for_contiguous_layout")


def compiler() -> tuple[Literal["nvcc", "nvrtc"], Path]:
    """What the library reads from the environment when it compiles its first kernel (csrc/jit/compiler.hpp, 0.1.3).

    Returns:
        "nvcc" of the CUDA toolkit, or the driver-side "nvrtc"; and the folder that holds `cache/kernel.NAME.HASH`. The
        folder is not locked, and holds kernels of both.
    """
    asked = os.environ.get("DG_JIT_USE_NVRTC", "").strip()
    cache = os.environ.get("DG_JIT_CACHE_DIR", "")
    return "nvrtc" if asked.strip("0") else "nvcc", Path(cache) if cache else Path.home() / ".deep_gemm"


# --- casts to E4M3 with block scales, in the layouts of DeepGEMM's kernels: Triton on CUDA, plain torch elsewhere ---

TILE: Final = 128
LARGEST: Final = 448.0
# DeepGEMM's own casts take no less than 1e-4: gradients of a mean over many tokens become zeros there.
SMALLEST_AMAX: Final = 1e-30
WARPS: Final = 8

Columns = Literal["none", "vectors", "blocks"]
_COLUMNS: Final[dict[Columns, int]] = {"none": 0, "vectors": 1, "blocks": 2}


@TRITON.required_entry
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
    """

    values: Any
    scales: Any
    turned: Any
    turned_scales: Any


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
    tokens: Any, tiles: Tiles, *, rows: bool = True, columns: Columns = "none", power_of_two: bool | None = None
) -> tuple[RowCast | None, ColumnCast | None]:
    """Round rows, or gradients of them, to E4M3, row-wise, column-wise, or both from one read.

    Args:
        tokens: bf16 [R, D] sorted by expert, D whole blocks of 128.
        tiles: of the same numbers of rows.
        rows: whether the row-wise copy is wanted.
        columns: which column-wise copy is wanted.
        power_of_two: round scales up to powers of two; by default on Blackwell, whose kernels take only these.
    """
    if power_of_two is None:
        power_of_two = _wants_powers_of_two(tokens.device)
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


def cast_weight(weight: Any, *, turn: bool = True, power_of_two: bool | None = None) -> QuantizedWeight:
    """Round weights [E, N, K] to E4M3 with one scale for each 128 x 128 of an expert.

    Args:
        weight: bf16, N and K whole blocks of 128.
        turn: whether the transposed copy is wanted, too, which the gradient of the rows takes.
        power_of_two: as for `cast_tokens`.
    """
    weight = weight.detach()
    if power_of_two is None:
        power_of_two = _wants_powers_of_two(weight.device)
    if weight.device.type != "cuda":
        return cast_weight_reference(weight, turn=turn, power_of_two=power_of_two)
    experts, height, width = weight.shape
    new, tall, wide = weight.new_empty, height // TILE, width // TILE
    made = QuantizedWeight(
        new(experts, height, width, dtype=torch.float8_e4m3fn),
        new(experts, tall, wide, dtype=torch.float32),
        new(experts if turn else 0, width, height, dtype=torch.float8_e4m3fn),
        new(experts if turn else 0, wide, tall, dtype=torch.float32),
    )
    packed = weight.contiguous()
    kernels.require().cast_weight_kernel[(experts * height // TILE, width // TILE)](
        packed, *made, height, width, turn=turn, power_of_two=power_of_two, num_warps=WARPS
    )
    return made if turn else made._replace(turned=None, turned_scales=None)


def cast_weight_reference(weight: Any, *, turn: bool = True, power_of_two: bool = False) -> QuantizedWeight:
    """`cast_weight` in plain torch, wherever the weight lies."""
    experts, height, width = weight.shape
    tall, wide = height // TILE, width // TILE
    blocks = weight.float().view(experts, tall, TILE, wide, TILE)
    scales = _scale_of(blocks.abs().amax(dim=(2, 4)), power_of_two)
    values = _round(blocks, scales[:, :, None, :, None]).view(experts, height, width)
    turned = values.view(torch.uint8).transpose(1, 2).contiguous().view(torch.float8_e4m3fn) if turn else None
    turned_scales = scales.transpose(1, 2).contiguous() if turn else None
    return QuantizedWeight(values, scales, turned, turned_scales)


def _scale_of(amax: Any, power_of_two: bool) -> Any:
    scale = amax.clamp(min=SMALLEST_AMAX) * (1.0 / LARGEST)
    if not power_of_two:
        return scale
    bits = scale.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)


def _round(values: Any, scale: Any) -> Any:
    return (values * (1.0 / scale)).to(torch.float8_e4m3fn)


# --- product ---

ARCHITECTURES: Final = (9, 10)  # major compute capability; DeepGEMM has no kernels for others

MOST_LAUNCHES: Final = 16  # of one product an expert; a launch takes the host about 20 microseconds

WEIGHT_GRADIENT_IN_BF16: Final = Refusal(
    "deep_gemm",
    "weight-gradient-bf16",
    f"more than {MOST_LAUNCHES} experts have unequal numbers of tiles: the gradient of the weights is made by the "
    "native grouped product, from the bf16 rows, because a launch for each expert would take longer",
)


def why_not_deep_gemm(device: Any, dtype: Any, in_features: int, out_features: int) -> Refusal | None:
    """Why DeepGEMM cannot take an expert bank; None where it can.

    Args:
        device, dtype: of rows and weights; the kernel gives bf16.
        in_features, out_features: K and N, which are to be whole blocks of 128.
    """
    major = _architecture(device)
    if not major:
        return Refusal("deep_gemm", "device", f"the weights lie on {device}, where DeepGEMM has no kernels")
    if major not in ARCHITECTURES:
        return Refusal("deep_gemm", "arch", f"compute capability {major}.x: DeepGEMM has kernels for 9.x and 10.x")
    if dtype != torch.bfloat16:
        return Refusal("deep_gemm", "dtype", f"the weights are {dtype}: DeepGEMM gives bf16 and nothing else")
    if in_features % TILE or out_features % TILE:
        widths = f"{in_features} -> {out_features} features"
        return Refusal("deep_gemm", "width", f"{widths}: block scaling takes whole blocks of {TILE}")
    if not DEEP_GEMM.is_available():
        return Refusal("deep_gemm", "deep-gemm-unavailable", DEEP_GEMM.why_unavailable())
    if TILE % (align := int(rows_alignment.require()())):
        return Refusal("deep_gemm", "alignment", f"its kernels take groups of {align} rows here, the casts give {TILE}")
    if torch.device(device).type == "cuda" and not TRITON.is_available():
        return Refusal("deep_gemm", "triton-unavailable", TRITON.why_unavailable())
    return None


def deep_gemm_grouped(
    rows: Any,
    weight: Any,
    rows_per_expert: Sequence[int],
    *,
    quantized: QuantizedWeight | None = None,
) -> Any:
    """Rows of expert e times weight[e]^T, forward and backward in block-scaled FP8.

    Gradients are those of the product without quantisation (a straight-through estimate), with every operand rounded
    for the product at hand. An expert without rows gets zeros.

    Args:
        rows: bf16 [R, K], by expert, R > 0; what the kernel wants padded is padded while it is rounded.
        weight: bf16 [E, N, K].
        rows_per_expert: E numbers that sum to R.
        quantized: these weights in FP8, where they were made before; made from `weight` without it.

    Returns:
        bf16 [R, N].

    Raises:
        VendorEntryMissing: DeepGEMM cannot be used here; the text says why.
    """
    return _GroupedFp8.apply(rows, weight, tuple(rows_per_expert), quantized)


def choose_weight_gradient(counts: Sequence[int]) -> Literal["fp8", "bf16"]:
    """In what the gradient of the weights is made fastest: FP8 in one launch or in a few, else bf16."""
    tiles = {-(-count // TILE) for count in counts}
    busy = sum(1 for count in counts if count)
    return "fp8" if len(tiles) == 1 or busy <= MOST_LAUNCHES else "bf16"


class _GroupedFp8(torch.autograd.Function):
    """Every product by DeepGEMM, but the gradient of the weights where that is asked for in bf16."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Any,
        weight: Any,
        counts: tuple[int, ...],
        quantized: QuantizedWeight | None,
    ) -> Any:
        trains = any(ctx.needs_input_grad)
        in_fp8 = trains and choose_weight_gradient(counts) == "fp8"
        ctx.tiles, ctx.in_fp8 = plan_tiles(counts, rows.device), in_fp8
        cast: Any
        cast, columns = cast_tokens(rows, ctx.tiles, columns="blocks" if in_fp8 else "none")
        made = quantized or cast_weight(weight, turn=trains)
        # The weight itself is kept for its version alone: autograd refuses a backward after it was changed in place.
        kept = None if in_fp8 else rows
        ctx.save_for_backward(weight, made.turned, made.turned_scales, kept, *(columns or (None, None)))
        return _multiply(cast, made.values, made.scales, ctx.tiles)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        weight, turned, turned_scales, rows, columns, column_scales = ctx.saved_tensors
        cast: Any
        cast, across = cast_tokens(gradient, ctx.tiles, columns="vectors" if ctx.in_fp8 else "none")
        of_rows = _multiply(cast, turned, turned_scales, ctx.tiles)
        if across is None:
            of_weight = grouped_weight_gradient(gradient, rows, weight, ctx.tiles.counts)
        else:
            of_weight = _weight_gradient(across, ColumnCast(columns, column_scales), weight, ctx.tiles)
        return of_rows, of_weight, None, None


def multiply_padded(cast: RowCast, values: Any, scales: Any) -> Any:
    """Padded rows times the weights of their experts; rows of group -1 may be left unwritten."""
    out = torch.empty(len(cast.values), values.shape[1], dtype=torch.bfloat16, device=values.device)
    grouped_fp8_gemm.require()((cast.values, cast.scales), (values, scales), out, cast.groups)
    return out


def _multiply(cast: RowCast, values: Any, scales: Any, tiles: Tiles) -> Any:
    return _without_padding(multiply_padded(cast, values, scales), tiles)


def _without_padding(padded: Any, tiles: Tiles) -> Any:
    """Each expert's own rows, in one copy; not by an index, which would have to be sent to the device first."""
    if tiles.padded == tiles.counts:
        return padded
    pairs = zip(tiles.starts, tiles.counts, strict=False)
    return torch.cat([padded[start : start + count] for start, count in pairs if count])


def _weight_gradient(gradient: ColumnCast, rows: ColumnCast, weight: Any, tiles: Tiles) -> Any:
    """gradient[e]^T rows[e] of each expert: bf16 [E, N, K]; zeros without rows."""
    experts, outputs, inputs = weight.shape
    out = torch.empty(experts, outputs, inputs, dtype=torch.bfloat16, device=weight.device)
    if len(set(tiles.padded)) == 1:
        _at_once(gradient, rows, out, tiles)
        return out
    starts = tiles.starts
    for expert in range(experts):
        first, last = starts[expert], starts[expert + 1]
        if first == last:
            out[expert].zero_()
            continue
        left = gradient.values[first * outputs : last * outputs].view(outputs, last - first)
        right = rows.values[first * inputs : last * inputs].view(inputs, last - first)
        own = slice(first // TILE, last // TILE)
        fp8_gemm.require()((left, gradient.scales[own].t()), (right, rows.scales[own].t()), out[expert])
    return out


def _at_once(gradient: ColumnCast, rows: ColumnCast, out: Any, tiles: Tiles) -> None:
    """All experts have as many tiles: one grouped product whose rows are the experts' output features."""
    experts, outputs, inputs = out.shape
    tokens = tiles.padded[0]
    own = tokens // TILE
    scales = gradient.scales.view(experts, own, outputs).transpose(0, 1).reshape(own, experts * outputs).t()
    grouped_fp8_gemm.require()(
        (gradient.values.view(experts * outputs, tokens), scales),
        (rows.values.view(experts, inputs, tokens), rows.scales.view(experts, own, inputs // TILE).transpose(1, 2)),
        out.view(experts * outputs, inputs),
        _experts_of_features(experts, outputs, out.device),
        compiled_dims="mn",  # the number of tokens changes from step to step: compiled in, each would be a kernel
    )


@lru_cache(maxsize=32)
def _experts_of_features(experts: int, outputs: int, device: Any) -> Any:
    """The expert of each of its output features: int32 [E * N]."""
    return torch.arange(experts, dtype=torch.int32, device=device).repeat_interleave(outputs)


def _architecture(device: Any) -> int:
    """Major compute capability; 0 where there is no CUDA device."""
    device = torch.device(device)
    return int(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else 0


def _wants_powers_of_two(device: Any) -> bool:
    """Whether scales are powers of two: Blackwell's block scales (E8M0) hold nothing else."""
    return _architecture(device) >= 10
