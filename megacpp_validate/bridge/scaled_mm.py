"""Consumers of FP8 payloads: `torch._scaled_mm`, and the pairs that DeepGEMM takes.

Each says what it takes; `quantized_tensor.hand_over` does the rest. What cannot be taken is multiplied in bf16,
and the product says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from .errors import WrongShape
from .quantized_tensor import Accepts, ScaledPayload, dequantize, hand_over

SCALED_MM: Final = Accepts("torch._scaled_mm", frozenset({"tensor", "row"}), frozenset({"e4m3", "e5m2"}))
_ONE_E5M2: Final = Accepts("torch._scaled_mm beside E5M2", frozenset({"tensor"}))
_NO_WIDTH: Final = Accepts("torch._scaled_mm with K or N that is no multiple of 16", frozenset())
DEEP_GEMM_ROWS: Final = Accepts("DeepGEMM", frozenset({"1x128"}))
DEEP_GEMM_WEIGHTS: Final = Accepts("DeepGEMM", frozenset({"128x128"}))


@dataclass(frozen=True, eq=False)
class Product:
    """What was multiplied, and in what.

    Attributes:
        values: [M, N] in bf16.
        ran: "fp8", or "dequantized" where a side had to be.
        because: why it was; empty for "fp8".
    """

    values: Any
    ran: Literal["fp8", "dequantized"]
    because: str = ""


def multiply(rows: Any, weight: Any) -> Product:
    """Rows [M, K] x weight [N, K]^T of two quantized tensors -> bf16 [M, N].

    Args:
        rows: quantized, one scale in all or one a row.
        weight: quantized, the same; E4M3 where the rows are E5M2.

    Raises:
        WrongShape: the two have no K in common.
        WrongDtype: one of them is no quantized tensor.
    """
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1]:
        raise WrongShape(
            f"rows {tuple(rows.shape)} and a weight {tuple(weight.shape)} have no product [M, K] x [N, K]^T. Next "
            "step: flatten the rows, and pass the weight as a linear layer holds it."
        )
    accepts = _NO_WIDTH if any(size % 16 for size in weight.shape) else SCALED_MM
    left = hand_over(rows, accepts)
    is_e5m2 = isinstance(left, ScaledPayload) and left.format == "e5m2"
    right = hand_over(weight, _ONE_E5M2 if is_e5m2 else accepts)
    if isinstance(left, ScaledPayload) and isinstance(right, ScaledPayload):
        return Product(_scaled_mm(left, right), "fp8")
    if isinstance(left, ScaledPayload):
        left = dequantize(rows, "the weight beside it had to be")
    if isinstance(right, ScaledPayload):
        right = dequantize(weight, "the rows beside it had to be")
    said = "; ".join(f"{side.source} {side.because}" for side in (left, right))
    numbers = left.values.to(torch.bfloat16), right.values.to(torch.bfloat16)
    return Product(numbers[0] @ numbers[1].t(), "dequantized", said)


def as_deep_gemm(payload: ScaledPayload) -> tuple[Any, Any]:
    """Values and fp32 scales that multiply, as DeepGEMM takes them: E4M3 [R, K], one for each block."""
    return payload.payload, payload.multiplier()


def _scaled_mm(left: ScaledPayload, right: ScaledPayload) -> Any:
    scales = left.multiplier(), right.multiplier()
    if left.block != right.block:  # one scale in all is also one a row
        scales = scales[0].expand(left.rows, 1), scales[1].expand(right.rows, 1)
    by_row = "row" in (left.block, right.block)
    first, second = (scales[0].contiguous(), scales[1].t().contiguous()) if by_row else scales
    return torch._scaled_mm(
        left.payload.contiguous(),
        right.payload.contiguous().t(),
        scale_a=first,
        scale_b=second,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
