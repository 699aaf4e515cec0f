"""Grouped GEMM: each expert's rows times that expert's weight.

The fused path is torch's grouped_mm, a CUTLASS kernel for bf16 on compute capability 9.x and 10.x. Elsewhere torch
would loop too, and wait for the device to learn the numbers of rows, which the loop here has on the host.

Of grouped_mm the products are used, forward and backward, and never its autograd: on sm_100 the weight gradient of an
expert without rows was what lay in memory (pytorch/pytorch#172439, NVIDIA/cutlass#2674), and an expanded or sliced
gradient breaks its rule for strides. Here gradients are packed first, and those of idle experts are set to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .norms import INIT_STD, without_autocast

FUSED_MAJORS: Final = (9, 10)  # GroupedBlas.cpp: _scaled_mm_allowed_device(sm90_only, sm100_only)
ALIGNMENT_BYTES: Final = 16  # of every row, for the tensor memory accelerator


def grouped_gemm(rows: Any, weight: Any, rows_per_expert: Sequence[int]) -> Any:
    """Rows of expert e times weight[e]^T, on the fused path where it applies.

    Args:
        rows: [R, K], by expert.
        weight: [E, N, K] in the same dtype.
        rows_per_expert: E numbers that sum to R, on the host; 0 is an idle expert, whose weight gets a gradient of
            zeros.

    Returns:
        [R, N] in the same dtype, also inside an autocast region; accumulated in fp32 at least.
    """
    _check(rows, weight, rows_per_expert)
    if grouped_mm_refusal(rows, weight):
        return grouped_gemm_loop(rows, weight, rows_per_expert)
    return _FusedGroupedGemm.apply(rows, weight, tuple(rows_per_expert))


def grouped_gemm_loop(rows: Any, weight: Any, rows_per_expert: Sequence[int]) -> Any:
    """The same by one matrix product an expert: the reference, for every dtype and device."""
    _check(rows, weight, rows_per_expert)
    # unbind rather than weight[e]: its backward builds the gradient of all experts once, not once an expert. A product
    # of no rows gives the weight of an idle expert its gradient of zeros.
    pairs = zip(rows.split(list(rows_per_expert)), weight.unbind(0), strict=True)
    with without_autocast(rows):
        return torch.cat([piece @ one.t() for piece, one in pairs])


@torch.no_grad()
def grouped_weight_gradient(gradient: Any, rows: Any, weight: Any, rows_per_expert: Sequence[int]) -> Any:
    """gradient[e]^T rows[e] of each expert: what `grouped_gemm` gives a weight, for who makes the output otherwise.

    Args:
        gradient: of the output, [R, N].
        rows: [R, K], by expert.
        weight: [E, N, K] in the same dtype; its values are not read.
        rows_per_expert: as for `grouped_gemm`.

    Returns:
        [E, N, K], outside any graph; zeros for an idle expert.
    """
    _check(rows, weight, rows_per_expert)
    if grouped_mm_refusal(rows, weight):
        pieces = zip(gradient.split(rows_per_expert), rows.split(rows_per_expert), strict=True)
        return torch.stack([of_output.t() @ of_rows for of_output, of_rows in pieces])
    ends = ends_of(rows_per_expert, rows.device)
    idle = [index for index, count in enumerate(rows_per_expert) if count == 0]
    return _fused_weight_gradient(packed(gradient), packed(rows), ends, idle)


def grouped_mm_refusal(rows: Any, weight: Any) -> str:
    """Why the fused path cannot be taken for rows [R, K] and weights [E, N, K]; empty where it can.

    The first reason that holds is returned.
    """
    if _fused_operator() is None:
        return f"torch {torch.__version__} has no grouped_mm"
    if rows.device.type != "cuda" or torch.version.hip is not None:
        return f"rows lie on {rows.device}: the fused kernel is CUDA's"
    major, minor = torch.cuda.get_device_capability(rows.device)
    if major not in FUSED_MAJORS:
        return f"compute capability {major}.{minor}: the fused kernel is built for 9.x and 10.x"
    return _operand_refusal(rows, weight)


def _operand_refusal(rows: Any, weight: Any) -> str:
    """What of the operands themselves, wherever they lie, keeps them from the fused kernel."""
    if rows.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"rows are {rows.dtype} and weights {weight.dtype}: the fused kernel takes bfloat16"
    _, outputs, inputs = weight.shape
    per_row = ALIGNMENT_BYTES // rows.dtype.itemsize
    if inputs % per_row or outputs % per_row or not inputs or not outputs:
        return f"K is {inputs} and N {outputs}: the fused kernel takes multiples of {per_row}"
    if rows.shape[0] == 0:
        return "there are no rows"
    return ""


def _fused_operator() -> Callable[..., Any] | None:
    """Public since torch 2.10; before that under its private name."""
    return getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _check(rows: Any, weight: Any, rows_per_expert: Sequence[int]) -> None:
    counts = list(rows_per_expert)
    if len(counts) != weight.shape[0] or min(counts, default=0) < 0 or sum(counts) != rows.shape[0]:
        raise ValueError(
            f"numbers of rows {counts} for {weight.shape[0]} experts and rows of shape {tuple(rows.shape)}: take one "
            "an expert from the same routing map as the rows, 0 where it is idle."
        )


class _FusedGroupedGemm(torch.autograd.Function):
    """Forward, and both products of the backward, by torch's grouped_mm; `offs` holds the end of each expert's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, rows_per_expert: tuple[int, ...]) -> Any:
        ends = ends_of(rows_per_expert, rows.device)
        rows, weight = packed(rows), packed(weight)
        ctx.save_for_backward(rows, weight, ends)
        ctx.idle = [index for index, count in enumerate(rows_per_expert) if count == 0]
        return grouped_product(rows, weight.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Any, Any, None]:
        rows, weight, ends = ctx.saved_tensors
        grad = packed(grad)
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        rows_grad = grouped_product(grad, weight, ends) if needs_rows else None
        weight_grad = _fused_weight_gradient(grad, rows, ends, ctx.idle) if needs_weight else None
        return rows_grad, weight_grad, None


def ends_of(rows_per_expert: Sequence[int], device: Any) -> Any:
    """int32 [E] on the device: the end of each expert's rows. The host goes on, which `device=` would not let it."""
    return torch.tensor(list(accumulate(rows_per_expert)), dtype=torch.int32).to(device, non_blocking=True)


def _fused_weight_gradient(grad: Any, rows: Any, ends: Any, idle: list[int]) -> Any:
    weight_grad = grouped_product(grad.t(), rows, ends)
    if idle:
        weight_grad[torch.tensor(idle, device=weight_grad.device)] = 0
    return weight_grad


def grouped_product(left: Any, right: Any, ends: Any) -> Any:
    """torch's grouped product, without its autograd; `ends` int32 [E] on the device."""
    operator = _fused_operator()
    return operator(left, right, offs=ends)  # type: ignore[misc]


def packed(matrix: Any) -> Any:
    """Row-major with the plain strides, beginning at an aligned address: what the kernel's descriptors take.

    `contiguous()` alone is not enough: it keeps a slice that begins anywhere, and the strides of a single row.
    """
    plain = matrix.is_contiguous() and matrix.stride()[-2:] == (matrix.shape[-1], 1)
    if plain and matrix.storage_offset() * matrix.element_size() % ALIGNMENT_BYTES == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


class ExpertBank(nn.Module):
    """One linear layer an expert, without bias: `weight` [E, N, K]."""

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, dtype: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, rows: Any, rows_per_expert: Sequence[int]) -> Any:
        """Rows [R, in_features] by expert -> [R, out_features]."""
        return grouped_gemm(rows, self.weight, rows_per_expert)
