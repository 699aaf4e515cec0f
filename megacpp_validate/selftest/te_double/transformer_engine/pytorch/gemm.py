"""The matrix product of every linear layer, with its gradients; and the mark of what is no product."""

from __future__ import annotations

from typing import Any

import torch

from .cpp_extensions import gemm as extension
from .layer import Rounder
from .quantization import FP8GlobalStateManager as Manager
from .quantized import operand


class Gemm(torch.autograd.Function):
    """Rows [M, K] x weight [N, K] (+ bias [N]) -> [M, N]; rounded operands and an fp32 sum in FP8."""

    @staticmethod
    def forward(
        ctx: Any, rows: Any, weight: Any, bias: Any, rounder: Rounder | None, gemm: int, last_of_scope: bool
    ) -> Any:
        """[M, K] -> [M, N]."""
        ctx.rounder, ctx.gemm, ctx.last_of_scope = rounder, gemm, last_of_scope
        if rounder is None:
            ctx.save_for_backward(rows, weight, bias)
            return torch.nn.functional.linear(rows, weight, bias)
        by_rows, by_columns = rounder.round(rows, "input", gemm)
        rounded, _ = rounder.round(weight, "weight", gemm)
        ctx.casts = rounder.cast(rows, "input", gemm), rounder.cast(weight, "weight", gemm)
        ctx.save_for_backward(by_columns, rounded, bias)
        ctx.dtypes = rows.dtype, weight.dtype
        out = extension.tex.generic_gemm(operand(rounded, ctx.casts[1]), True, operand(by_rows, ctx.casts[0]), False)
        return (out if bias is None else out + bias.float()).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """[M, N] -> gradients of rows, weight and bias."""
        rows, weight, bias = ctx.saved_tensors
        if ctx.rounder is None:
            to_rows, to_weight = grad @ weight, grad.t() @ rows
        else:
            by_rows, by_columns = ctx.rounder.round(grad, "grad", ctx.gemm)
            cast, of_weight = ctx.rounder.cast(grad, "grad", ctx.gemm), operand(weight, ctx.casts[1])
            to_rows = extension.tex.generic_gemm(of_weight, False, operand(by_rows, cast), False).to(ctx.dtypes[0])
            given = operand(rows, ctx.casts[0]), False, operand(by_columns, cast), True
            to_weight = extension.tex.generic_gemm(*given).to(ctx.dtypes[1])
        to_bias = None if bias is None else grad.float().sum(0).to(bias.dtype)
        if ctx.last_of_scope:
            Manager.reduce_and_update_fp8_tensors(forward=False)
        return to_rows, to_weight, to_bias, None, None, None


class Mark(torch.autograd.Function):
    """Passes a tensor on, so that its graph says which library computed it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        """The tensor itself."""
        del ctx
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient itself."""
        del ctx
        return grad
