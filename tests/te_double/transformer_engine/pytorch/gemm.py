"""The matrix product of every linear layer, with its gradients; and the mark of what is no product."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .cpp_extensions import gemm as extension
from .layer import Rounder
from .quantization import FP8GlobalStateManager as Manager
from .quantized import Cast, operand

_Product = Literal["fprop", "dgrad", "wgrad"]
# Which products accumulate in two stages under a recipe that does not say it itself.
_2X_ACC_FPROP = False
_2X_ACC_DGRAD = True
_2X_ACC_WGRAD = True


def _split(recipe: Any, product: _Product) -> bool:
    else_said = {"fprop": _2X_ACC_FPROP, "dgrad": _2X_ACC_DGRAD, "wgrad": _2X_ACC_WGRAD}
    said = getattr(recipe, f"fp8_gemm_{product}", None)
    return else_said[product] if said is None else bool(said.use_split_accumulator)


def _product(recipe: Any, product: _Product, first: tuple[Any, Cast, bool], second: tuple[Any, Cast, bool]) -> Any:
    """Of two operands, each its rounded values, what cast them, and whether they are transposed."""
    return extension.tex.generic_gemm(
        operand(*first[:2]), first[2], operand(*second[:2]), second[2], use_split_accumulator=_split(recipe, product)
    )


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
        out = _product(rounder.recipe, "fprop", (rounded, ctx.casts[1], True), (by_rows, ctx.casts[0], False))
        return (out if bias is None else out + bias.float()).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """[M, N] -> gradients of rows, weight and bias."""
        rows, weight, bias = ctx.saved_tensors
        if ctx.rounder is None:
            to_rows, to_weight = grad @ weight, grad.t() @ rows
        else:
            by_rows, by_columns = ctx.rounder.round(grad, "grad", ctx.gemm)
            cast, recipe = ctx.rounder.cast(grad, "grad", ctx.gemm), ctx.rounder.recipe
            to_rows = _product(recipe, "dgrad", (weight, ctx.casts[1], False), (by_rows, cast, False))
            to_weight = _product(recipe, "wgrad", (rows, ctx.casts[0], False), (by_columns, cast, True))
            to_rows, to_weight = to_rows.to(ctx.dtypes[0]), to_weight.to(ctx.dtypes[1])
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
