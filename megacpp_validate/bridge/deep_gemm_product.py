"""An expert bank's product by DeepGEMM: forward and both gradients in block-scaled FP8.

DeepGEMM multiplies E4M3 values with one fp32 scale for each 1 x 128 of the rows and each 128 x 128 of the weights, and
adds to fp32 every 128 products (https://github.com/deepseek-ai/DeepGEMM; DeepSeek-V3, arXiv:2412.19437, section 3.3).

Gradients are E4M3 as everything else is: a scale of its own for every 128 values gives each few of them the range that
E5M2 buys for a whole tensor, and E4M3's third mantissa bit halves the error ("we adopt the E4M3 format on all tensors
for higher precision", section 3.3.2 there). Sums run along the features in the gradient of the rows and along the
tokens in that of the weights, so a gradient is rounded once for each, from one read.

The gradient of the weights, which sums over tokens, is the grouped product again: the transposed gradient with a scale
for each 1 x 128 tokens on the left, the transposed rows with one for each 128 tokens x 128 features on the right. Where
all experts have as many tiles of 128 tokens that is one launch whose groups are the experts, else one for each expert.
DeepGEMM's k-grouped FP8 kernel, which would take both at 1 x 128, is not in sgl-deep-gemm 0.1.3. On an H200, for 8 x
1024 x 4096 x 4096 (2026-11-21): one launch 0.238 ms, one for each expert 0.269, torch's grouped_mm in bf16 0.397,
`fp8_gemm_nt` with both at 1 x 128 into fp32 0.621, a k-grouped kernel in Triton 3.6 0.400 to 0.663; the error is 0.0369
with the block on the right and 0.0364 without. With 64 experts of unequal rows a launch for each costs the host more
than grouped_mm takes, so more than `MOST_LAUNCHES` stay in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import torch

from ..native.grouped_gemm import grouped_weight_gradient
from .backends import Refusal
from .deep_gemm import DEEP_GEMM, fp8_gemm, grouped_fp8_gemm, masked_fp8_gemm, rows_alignment
from .deep_gemm_cast import (
    TILE,
    TRITON,
    ColumnCast,
    QuantizedWeight,
    RowCast,
    Tiles,
    cast_masked,
    cast_tokens,
    cast_weight,
    plan_tiles,
    renew_weight,
)

ARCHITECTURES: Final = (9, 10)  # major compute capability; DeepGEMM has no kernels for others

MOST_LAUNCHES: Final = 16  # of one product an expert; a launch takes the host about 20 microseconds

WeightGradient = Literal["fp8", "bf16"]
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
    if TILE % int(rows_alignment.require()()):
        align = int(rows_alignment.require()())
        return Refusal("deep_gemm", "alignment", f"its kernels take groups of {align} rows here, the casts give {TILE}")
    if torch.device(device).type == "cuda" and not TRITON.is_available():
        return Refusal("deep_gemm", "triton-unavailable", TRITON.why_unavailable())
    return None


def quantize_weight(weight: Any, *, turn: bool = True, keep: bool = False) -> QuantizedWeight:
    """Weights [E, N, K] in block-scaled FP8.

    Args:
        weight: bf16.
        turn: whether the transposed copy is wanted, which the gradient of the rows takes.
        keep: whether `renewed_weight` is to take it later.
    """
    return cast_weight(weight, turn=turn, keep=keep, power_of_two=_wants_powers_of_two(weight.device))


def renewed_weight(kept: QuantizedWeight | None, weight: Any) -> QuantizedWeight:
    """The kept copy of a bf16 weight [E, N, K], made right by the bits that it has now; a new one where none fits.

    See `deep_gemm_cast.renew_weight`: nothing that the weight was before can be multiplied.
    """
    if kept is None or kept.values.shape != weight.shape or kept.values.device != weight.device:
        return quantize_weight(weight, keep=True)
    renew_weight(kept, weight, power_of_two=_wants_powers_of_two(weight.device))
    return kept


def deep_gemm_grouped(
    rows: Any,
    weight: Any,
    rows_per_expert: Sequence[int],
    *,
    quantized: QuantizedWeight | None = None,
    weight_gradient: WeightGradient | None = None,
) -> Any:
    """Rows of expert e times weight[e]^T, forward and backward in block-scaled FP8.

    Gradients are those of the product without quantisation (a straight-through estimate), with every operand rounded
    for the product at hand. An expert without rows gets zeros.

    Args:
        rows: bf16 [R, K], by expert, R > 0; what the kernel wants padded is padded while it is rounded.
        weight: bf16 [E, N, K].
        rows_per_expert: E numbers that sum to R.
        quantized: these weights in FP8, where they were made before; made from `weight` without it.
        weight_gradient: "fp8", or "bf16" for a native product of the gradient and the bf16 rows; without it, what
            `choose_weight_gradient` says.

    Returns:
        bf16 [R, N].

    Raises:
        VendorEntryMissing: DeepGEMM cannot be used here; the text says why.
    """
    counts = tuple(rows_per_expert)
    taken = weight_gradient or choose_weight_gradient(counts)
    return _GroupedFp8.apply(rows, weight, counts, quantized, taken)


def choose_weight_gradient(counts: Sequence[int]) -> WeightGradient:
    """In what the gradient of the weights is made fastest: FP8 in one launch or in a few, else bf16."""
    tiles = {-(-count // TILE) for count in counts}
    busy = sum(1 for count in counts if count)
    return "fp8" if len(tiles) == 1 or busy <= MOST_LAUNCHES else "bf16"


def deep_gemm_masked(rows: Any, weight: QuantizedWeight, counts: Any, *, expected_rows: int) -> Any:
    """The first `counts[e]` rows of expert e times its weight^T, without gradients; a CUDA graph may hold the call.

    Args:
        rows: bf16 [E, M, K]; what lies past an expert's own rows is not read.
        weight: of [E, N, K]; `quantize_weight(weight, turn=False)` suffices.
        counts: int32 [E] on the device of the rows, at most M each.
        expected_rows: about how many rows an expert has, by which the kernel is chosen.

    Returns:
        bf16 [E, M, N], zeros past an expert's own rows; a part of a larger tensor where M is no multiple of 128.
    """
    values, scales = cast_masked(rows, counts, power_of_two=_wants_powers_of_two(rows.device))
    out = rows.new_zeros(*values.shape[:2], weight.values.shape[1])
    masked_fp8_gemm.require()((values, scales), (weight.values, weight.scales), out, counts, expected_rows)
    return out[:, : rows.shape[1]]


class _GroupedFp8(torch.autograd.Function):
    """Every product by DeepGEMM, but the gradient of the weights where that is asked for in bf16."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Any,
        weight: Any,
        counts: tuple[int, ...],
        quantized: QuantizedWeight | None,
        weight_gradient: WeightGradient,
    ) -> Any:
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        in_fp8 = needs_weight and weight_gradient == "fp8"
        ctx.tiles, ctx.in_fp8 = plan_tiles(counts, rows.device), in_fp8
        cast, columns = _cast(rows, ctx.tiles, columns="blocks" if in_fp8 else "none")
        made = quantized or quantize_weight(weight, turn=needs_rows)
        # The weight itself is kept for its version alone: autograd refuses a backward after it was changed in place.
        ctx.save_for_backward(
            weight,
            *((made.turned, made.turned_scales) if needs_rows else (None, None)),
            rows if needs_weight and not in_fp8 else None,
            *(columns or (None, None)),
        )
        return _multiply(cast, made.values, made.scales, ctx.tiles)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        weight, turned, turned_scales, rows, columns, column_scales = ctx.saved_tensors
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        cast, turned_gradient = _cast(gradient, ctx.tiles, rows=needs_rows, columns="vectors" if ctx.in_fp8 else "none")
        of_rows = _multiply(cast, turned, turned_scales, ctx.tiles) if needs_rows else None
        of_weight = None
        if ctx.in_fp8:
            of_weight = _weight_gradient(turned_gradient, ColumnCast(columns, column_scales), weight, ctx.tiles)
        elif needs_weight:
            of_weight = grouped_weight_gradient(gradient, rows, weight, ctx.tiles.counts)
        return of_rows, of_weight, None, None, None


def _cast(tokens: Any, tiles: Tiles, *, rows: bool = True, columns: Any) -> tuple[Any, Any]:
    power_of_two = _wants_powers_of_two(tokens.device)
    if not rows and columns == "none":
        return None, None
    return cast_tokens(tokens, tiles, rows=rows, columns=columns, power_of_two=power_of_two)


def _multiply(cast: RowCast, values: Any, scales: Any, tiles: Tiles) -> Any:
    """Padded rows times the weights of their experts, without the padding."""
    out = torch.empty(tiles.rows, values.shape[1], dtype=torch.bfloat16, device=values.device)
    # Rows of group -1 may be left unwritten: what `out` holds there leaves with the padding.
    grouped_fp8_gemm.require()((cast.values, cast.scales), (values, scales), out, cast.groups)
    return _without_padding(out, tiles)


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
