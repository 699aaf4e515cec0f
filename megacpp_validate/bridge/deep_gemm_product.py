"""An expert bank's product by DeepGEMM: forward in block-scaled FP8, both gradients native.

DeepGEMM multiplies E4M3 values with one fp32 scale for each 1 x 128 of the rows and each 128 x 128 of the weights, and
adds to fp32 every 128 products (https://github.com/deepseek-ai/DeepGEMM; DeepSeek-V3, arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from ..native.grouped_gemm import grouped_gemm
from ..native.permute import pad_rows, unpad_rows
from .backends import Refusal
from .deep_gemm import DEEP_GEMM, cast_blocks, cast_rows, grouped_fp8_gemm, rows_alignment

BLOCK: Final = 128  # values along the sum, and rows of a weight, that share a scale
ARCHITECTURES: Final = (9, 10)  # major compute capability; DeepGEMM has no kernels for others
BACKWARD: Final = Refusal(
    "deep_gemm",
    "backward-native",
    "the forward product runs in FP8; both gradients are the native grouped GEMM's, from the bf16 rows and weights",
)


class QuantizedWeight(NamedTuple):
    """Weights in block-scaled FP8: values E4M3 [E, N, K], scales fp32 [E, N / 128, K / 128]."""

    values: Any
    scales: Any


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
    if in_features % BLOCK or out_features % BLOCK:
        widths = f"{in_features} -> {out_features} features"
        return Refusal("deep_gemm", "width", f"{widths}: block scaling takes whole blocks of {BLOCK}")
    if not DEEP_GEMM.is_available():
        return Refusal("deep_gemm", "deep-gemm-unavailable", DEEP_GEMM.why_unavailable())
    return None


def quantize_weight(weight: Any) -> QuantizedWeight:
    """Weights [E, N, K] in block-scaled FP8; N and K are multiples of 128."""
    experts, outputs, inputs = weight.shape
    with torch.no_grad():
        # Blocks do not cross experts, because N is whole blocks: all experts are cast as one matrix.
        values, scales = cast_blocks.require()(
            weight.detach().reshape(experts * outputs, inputs), use_ue8m0=_wants_powers_of_two(weight.device)
        )
    return QuantizedWeight(
        values.view(experts, outputs, inputs), scales.view(experts, outputs // BLOCK, inputs // BLOCK).contiguous()
    )


def deep_gemm_grouped(
    rows: Any, weight: Any, rows_per_expert: Sequence[int], *, quantized: QuantizedWeight | None = None
) -> Any:
    """Rows of expert e times weight[e]^T: forward in block-scaled FP8, both gradients in bf16.

    The gradients are those of the product without quantisation (a straight-through estimate): the native grouped GEMM
    of the output's gradient with the bf16 weights, and with the bf16 rows. An expert without rows gets zeros.

    Args:
        rows: bf16 [R, K], by expert, R > 0; padded here to what the kernel takes.
        weight: bf16 [E, N, K].
        rows_per_expert: E numbers that sum to R.
        quantized: the weights in FP8 where they were made before; from `weight` without it.

    Returns:
        bf16 [R, N].

    Raises:
        VendorEntryMissing: DeepGEMM cannot be used here; the text says why.
    """
    return _GroupedFp8.apply(rows, weight, tuple(rows_per_expert), quantized)


class _GroupedFp8(torch.autograd.Function):
    """Forward by DeepGEMM, backward by the native grouped GEMM."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, counts: tuple[int, ...], quantized: QuantizedWeight | None) -> Any:
        ctx.counts = counts
        ctx.save_for_backward(rows, weight)
        return _multiply(rows, quantized or quantize_weight(weight), counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, _, _ = ctx.needs_input_grad
        gradient = gradient.contiguous()
        of_rows = grouped_gemm(gradient, weight.transpose(1, 2), ctx.counts) if needs_rows else None
        of_weight = _weight_gradient(gradient, rows, weight, ctx.counts) if needs_weight else None
        return of_rows, of_weight, None, None


def _multiply(rows: Any, weight: QuantizedWeight, counts: tuple[int, ...]) -> Any:
    align = int(rows_alignment.require()())
    padded, padded_counts = pad_rows(rows, counts, align)
    values, scales = cast_rows.require()(padded, use_ue8m0=_wants_powers_of_two(rows.device))
    out = torch.empty(padded.shape[0], weight.values.shape[1], dtype=torch.bfloat16, device=rows.device)
    groups = _group_of_each_row(counts, padded_counts, rows.device)
    # Rows of group -1 are skipped: what `out` holds there is not written, and leaves with the padding.
    grouped_fp8_gemm.require()((values, scales), (weight.values, weight.scales), out, groups)
    return unpad_rows(out, counts, align)


def _group_of_each_row(counts: Sequence[int], padded_counts: Sequence[int], device: Any) -> Any:
    """The expert of each padded row, -1 for padding: int32 [R']. Sizes come from the host: no wait for the device."""
    groups: list[int] = []
    sizes: list[int] = []
    for expert, (count, padded) in enumerate(zip(counts, padded_counts, strict=True)):
        groups += [expert, -1]
        sizes += [count, padded - count]
    table = torch.tensor([groups, sizes], dtype=torch.int32).to(device, non_blocking=True)
    return table[0].repeat_interleave(table[1], output_size=sum(padded_counts))


def _weight_gradient(gradient: Any, rows: Any, weight: Any, counts: tuple[int, ...]) -> Any:
    """gradient[e]^T rows[e] of each expert: [E, N, K]; zeros without rows."""
    out = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    pieces = zip(out.unbind(0), gradient.split(counts), rows.split(counts), strict=True)
    for into, of_output, of_rows in pieces:
        if of_rows.shape[0]:
            torch.mm(of_output.t(), of_rows, out=into)
    return out


def _architecture(device: Any) -> int:
    """Major compute capability; 0 where there is no CUDA device."""
    device = torch.device(device)
    return int(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else 0


def _wants_powers_of_two(device: Any) -> bool:
    """Whether scales are powers of two: Blackwell's block scales (E8M0) hold nothing else."""
    return _architecture(device) >= 10
