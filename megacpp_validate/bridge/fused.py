"""A residual connection and the RMSNorm behind it, as one pass over the rows.

The plain form is two operations of torch, `rows + added` and `native.norms.rms_norm`: the sum is written, and read
again. The kernel writes the sum while it norms it. Both round the sum once to the dtype of the rows, and norm what it
was rounded to, so that the stream and its norm agree; the kernel computes in fp32. In the backward pass the gradient of
the norm and that of the sum are added in fp32, where the plain form rounds each of them first.

The gradient of the weight is summed by programs over rows of their own, in order, and then over programs by torch: the
same bits at every run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from ..native.mamba import ssd_chunked
from ..native.norms import rms_norm
from .backends import Choice, Refusal, choose
from .vendor import TRITON

# --- residual norm ---
# A residual connection and the RMSNorm behind it, as one pass over the rows.

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
WIDEST: Final = 16384  # a row lies in the registers of one program
PROGRAMS: Final = 512  # of the backward pass at most: parts of the weight's gradient; a rule that no device changes


@TRITON.entry
def residual_norm_kernels() -> Any:
    """The module of the two kernels."""
    from .kernels import rows

    return rows


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
        summed = rows + added  # rounded, and the native norm of it
        return summed, rms_norm(summed, weight, eps=eps)
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


class _AddRmsNorm(torch.autograd.Function):
    """Rows and what is added [..., D], weight [D] -> sum and norm [..., D]."""

    @staticmethod
    def forward(ctx: Any, rows: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        summed, normed = launch_norm(rows, added, weight, eps)
        ctx.save_for_backward(summed, weight)
        ctx.eps = eps
        return summed, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_summed: Any, of_normed: Any) -> tuple[Any, Any, Any, None]:
        summed, weight = ctx.saved_tensors
        of_rows, of_weight = launch_norm_backward(summed, weight, of_summed, of_normed, ctx.eps)
        return of_rows, of_rows, of_weight, None


def launch_norm(rows: Any, added: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """The forward kernel, a program a row: rows and added [..., D], weight [D] -> sum and norm, both [..., D]."""
    rows, added, weight = rows.contiguous(), added.contiguous(), weight.contiguous()
    summed, normed = torch.empty_like(rows), torch.empty_like(rows)
    width = rows.shape[-1]
    wide = _next_power(width)
    residual_norm_kernels.require().add_norm_kernel[(rows.numel() // width,)](
        rows, added, weight, summed, normed, eps, width=width, wide=wide, num_warps=_warps(wide)
    )
    return summed, normed


def launch_norm_backward(summed: Any, weight: Any, of_summed: Any, of_normed: Any, eps: float) -> tuple[Any, Any]:
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


# --- rotation ---
# Rotary embedding over [B, T, H, D], heads as a projection gives them.

ELEMENTS: Final = 2048  # of a program, in each half: 32 heads of 128


@TRITON.entry
def turn_kernel() -> Any:
    """The kernel."""
    from .kernels.rows import turn_kernel

    return turn_kernel


def turn_heads(rows: Any, cos: Any, sin: Any) -> Any:
    """Turn each pair of channels by the angle of its position, as `native.attention.apply_rope` does.

    Args:
        rows: [B, T, H, D], any strides.
        cos, sin: [at least T, D/2], on the device of `rows`; they get no gradient.

    Returns:
        [B, T, H, D], contiguous, in the dtype of `rows`, computed in the wider dtype of `rows` and the tables.
    """
    return _Turn.apply(rows, cos[: rows.shape[1]], sin[: rows.shape[1]])


class _Turn(torch.autograd.Function):
    """Rows [B, T, H, D], tables [T, D/2] -> [B, T, H, D]."""

    @staticmethod
    def forward(ctx: Any, rows: Any, cos: Any, sin: Any) -> Any:
        ctx.save_for_backward(cos, sin)
        return _turn(rows, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1.0), None, None


def _turn(rows: Any, cos: Any, sin: Any, sign: float) -> Any:
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    computes_in = torch.promote_types(torch.promote_types(rows.dtype, cos.dtype), sin.dtype)
    if rows.device.type == "cuda" and computes_in == torch.float32 and turn_kernel() is not None:
        launch_turn(rows, cos, sin, out, sign)
    else:
        turn_by_halves(rows, cos, sin, out, sign)
    return out


def launch_turn(rows: Any, cos: Any, sin: Any, out: Any, sign: float) -> None:
    """The kernel, in fp32 whatever the dtypes: write the turned rows into `out`, which is contiguous.

    Args:
        rows, out: [B, T, H, D].
        cos, sin: [T, D/2].
        sign: 1 for the turn, -1 for the turn back, which its gradient is.
    """
    batch, length, heads, width = rows.shape
    rows, cos, sin = (given if given.stride(-1) == 1 else given.contiguous() for given in (rows, cos, sin))
    half = width // 2
    wide = _next_power(half)
    group = max(1, min(_next_power(heads), ELEMENTS // wide))
    turn_kernel.require()[(batch * length, -(-heads // group))](
        rows, cos, sin, out, length, heads, *rows.stride()[:3], cos.stride(0), sin.stride(0), sign,
        half=half, wide=wide, group=group,
    )  # fmt: skip


def turn_by_halves(rows: Any, cos: Any, sin: Any, out: Any, sign: float) -> None:
    """The same in plain torch: each half is one product, and one more added to it, rounded where it is written."""
    (first, second), (low, high) = rows.chunk(2, dim=-1), out.chunk(2, dim=-1)
    turn, across = cos[:, None], sign * sin[:, None]
    torch.addcmul(second * -across, first, turn, out=low)
    torch.addcmul(first * across, second, turn, out=high)


# --- compiled scan ---
# The scan of M compiled by torch.compile: the same arithmetic, in fewer passes over memory.

Scan = Callable[..., tuple[Any, Any]]


def compiled_scan(device: Any) -> tuple[Scan, Choice]:
    """A scan to be called as `native.mamba.ssd_chunked` is, and which it is: "compiled" or "eager", recorded.

    What is compiled is compiled at the first call of each shape, dtype and kind of pass, for all layers of the process
    together. It is one graph or an error: a part that was left out would be slow without a word.

    Args:
        device: where the tensors will lie.
    """
    choice = choose(
        "compiled_scan", [("compiled", partial(why_not_compiled, torch.device(device))), ("eager", lambda: None)]
    )
    return (_compile() if choice.observed == "compiled" else ssd_chunked), choice


def why_not_compiled(device: Any) -> Refusal | None:
    """Why torch.compile cannot be asked on this machine for that kind of device.

    Looked for is what it starts: on the CPU the C++ compiler of torch's Inductor (`torch._inductor.config.cpp.cxx`), on
    CUDA Triton, and the C compiler that Triton builds its launchers with (`triton.runtime.build`).
    """
    if device.type not in ("cpu", "cuda"):
        return Refusal("compiled", "device", f"the scan is compiled on CPU and CUDA; the tensors lie on {device.type}")
    if device.type == "cuda" and not TRITON.is_available():
        return Refusal("compiled", "triton-unavailable", TRITON.why_unavailable())
    variable, compilers = ("CXX", ["g++"]) if device.type == "cpu" else ("CC", ["gcc", "clang"])
    compilers = [os.environ[variable]] if variable in os.environ else compilers
    if any(map(shutil.which, compilers)):
        return None
    return Refusal(
        "compiled",
        "no-compiler",
        f"torch.compile needs {' or '.join(compilers)}. Next step: install it, or name a compiler in {variable}",
    )


@cache
def _compile() -> Scan:
    compiled: Scan = torch.compile(ssd_chunked, dynamic=False, fullgraph=True)
    return compiled
