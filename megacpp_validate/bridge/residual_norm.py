"""A residual connection and the RMSNorm behind it, as one pass over the rows.

The plain form is two operations of torch, `rows + added` and `native.norms.rms_norm`: the sum is written, and read
again. The kernel writes the sum while it norms it. Both round the sum once to the dtype of the rows, and norm what it
was rounded to, so that the stream and its norm agree; the kernel computes in fp32. In the backward pass the gradient of
the norm and that of the sum are added in fp32, where the plain form rounds each of them first.

The gradient of the weight is summed by programs over rows of their own, in order, and then over programs by torch: the
same bits at every run.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from ..native.norms import rms_norm
from .backends import Choice, Refusal, choose
from .deep_gemm_cast import TRITON

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
WIDEST: Final = 16384  # a row lies in the registers of one program
PROGRAMS: Final = 512  # of the backward pass at most: parts of the weight's gradient; a rule that no device changes


@TRITON.entry
def residual_norm_kernels() -> Any:
    """The module of the two kernels."""
    from .kernels import residual_norm

    return residual_norm


def add_rms_norm(rows: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """The sum of a residual connection, and its RMSNorm.

    Args:
        rows, added: [..., D], of one dtype; bf16, fp16 and fp32 on CUDA may take the kernel, all else is plain torch.
        weight: [D], any floating dtype.
        eps: added to the mean square.

    Returns:
        (rows + added, its norm), each [..., D] in the dtype of the sum.

    Raises:
        ValueError: a weight that does not fit the rows.
    """
    fits = rows.shape == added.shape and rows.dtype == added.dtype and weight.shape == rows.shape[-1:]
    fits = fits and weight.dtype in DTYPES and rows.numel() > 0
    if not fits or why_not_fused(rows.shape[-1], rows.dtype, rows.device) is not None:
        return add_and_norm(rows, added, weight, eps)
    summed, normed = _AddRmsNorm.apply(rows, added, weight, eps)
    return summed, normed


def choose_residual_norm(hidden: int, *, dtype: Any, device: Any) -> Choice:
    """Which form rows [..., hidden] of that dtype and device take, recorded: "triton" or "torch"."""
    return choose(
        "residual_norm",
        [("triton", lambda: why_not_fused(hidden, dtype, torch.device(device))), ("torch", lambda: None)],
    )


def why_not_fused(hidden: int, dtype: Any, device: Any) -> Refusal | None:
    """Why the kernel cannot take rows of that width."""
    if device.type != "cuda":
        return Refusal("triton", "device", f"the kernel runs on CUDA, and the rows lie on {device.type}")
    if dtype not in DTYPES:
        return Refusal("triton", "dtype", f"the kernel computes in fp32, and the rows are {dtype}")
    if hidden > WIDEST:
        return Refusal("triton", "width", f"a row of {hidden} does not fit one program, which takes {WIDEST}")
    if residual_norm_kernels() is None:
        return Refusal("triton", "triton-unavailable", residual_norm_kernels.why_missing())
    return None


def add_and_norm(rows: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """The same in plain torch: the sum, rounded, and the native norm of it."""
    summed = rows + added
    return summed, rms_norm(summed, weight, eps=eps)


class _AddRmsNorm(torch.autograd.Function):
    """Rows and what is added [..., D], weight [D] -> sum and norm [..., D]."""

    @staticmethod
    def forward(ctx: Any, rows: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        summed, normed = launch(rows, added, weight, eps)
        ctx.save_for_backward(summed, weight)
        ctx.eps = eps
        return summed, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_summed: Any, of_normed: Any) -> tuple[Any, Any, Any, None]:
        summed, weight = ctx.saved_tensors
        of_rows, of_weight = launch_backward(summed, weight, of_summed, of_normed, ctx.eps)
        return of_rows, of_rows, of_weight, None


def launch(rows: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """The forward kernel, a program a row: rows and added [..., D], weight [D] -> sum and norm, both [..., D]."""
    rows, added, weight = rows.contiguous(), added.contiguous(), weight.contiguous()
    summed, normed = torch.empty_like(rows), torch.empty_like(rows)
    width = rows.shape[-1]
    wide = _next_power(width)
    residual_norm_kernels.require().add_norm_kernel[(rows.numel() // width,)](
        rows, added, weight, summed, normed, eps, width=width, wide=wide, num_warps=_warps(wide)
    )
    return summed, normed


def launch_backward(summed: Any, weight: Any, of_summed: Any, of_normed: Any, eps: float) -> tuple[Any, Any]:
    """The backward kernel, some rows a program, summed in fp32.

    Args:
        summed, of_summed, of_normed: [..., D], the sum, and the gradients of both outputs.
        weight: [D].

    Returns:
        Gradient of rows, and of what was added, which is the same, [..., D]; gradient of the weight [D] in its dtype.
    """
    weight, of_summed, of_normed = weight.contiguous(), of_summed.contiguous(), of_normed.contiguous()
    width = summed.shape[-1]
    number = summed.numel() // width
    share = -(-number // min(number, PROGRAMS))
    programs = -(-number // share)
    of_rows = torch.empty_like(summed)
    parts = torch.empty(programs, width, dtype=torch.float32, device=summed.device)
    wide = _next_power(width)
    residual_norm_kernels.require().add_norm_backward_kernel[(programs,)](
        summed, weight, of_summed, of_normed, of_rows, parts, number, share, eps,
        width=width, wide=wide, num_warps=_warps(wide),
    )  # fmt: skip
    return of_rows, parts.sum(0).to(weight.dtype)


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _warps(wide: int) -> int:
    """8 to 32 values a thread, between 4 and 16 warps of 32."""
    return min(max(wide // 512, 4), 16)
