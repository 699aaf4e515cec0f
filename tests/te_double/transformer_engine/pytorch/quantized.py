"""What a product is given in low precision: rounded values, with what Transformer Engine's tensors say of theirs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..recipes import Recipe
from .scaling import BLOCK, scale_of


class DType(Enum):
    """Formats, by Transformer Engine's names."""

    kFloat8E4M3 = 448.0  # noqa: N815 - Transformer Engine's name
    kFloat8E5M2 = 57344.0  # noqa: N815


@dataclass(frozen=True)
class Float8Quantizer:
    """One scale a tensor, from the calls before."""

    dtype: DType


@dataclass(frozen=True)
class Float8CurrentScalingQuantizer:
    """One scale a tensor, from the tensor at hand."""

    dtype: DType


@dataclass(frozen=True)
class Float8BlockQuantizer:
    """One scale a block: of a row, or square."""

    dtype: DType
    block_scaling_dim: int


@dataclass(frozen=True)
class Cast:
    """What became of one operand, without its values.

    Attributes:
        quantizer: what cast it.
        scale_inverse: [1], or one a block as products want them.
    """

    quantizer: Any
    scale_inverse: Any


class Float8TensorStorage:
    """Values [M, N] fp32 that share a scale."""

    def __init__(self, values: Any, cast: Cast) -> None:
        self.values, self._quantizer, self._fp8_dtype = values, cast.quantizer, cast.quantizer.dtype
        self._scale_inv = cast.scale_inverse

    @property
    def _data(self) -> Any:
        """The values as bytes of the format [M, N], as a product takes them."""
        kind = torch.float8_e4m3fn if self._fp8_dtype is DType.kFloat8E4M3 else torch.float8_e5m2
        return (self.values / self._scale_inv).to(kind).view(torch.uint8)


class Float8BlockwiseQTensorStorage:
    """Values [M, N] fp32 with one scale a block."""

    def __init__(self, values: Any, cast: Cast) -> None:
        self.values, self._quantizer, self._fp8_dtype = values, cast.quantizer, cast.quantizer.dtype
        self._rowwise_data, self._rowwise_scale_inv = values, cast.scale_inverse
        self._is_2D_scaled = cast.quantizer.block_scaling_dim == 2


def operand(values: Any, cast: Cast) -> Any:
    """Rounded values [M, N] with what cast them."""
    kind = Float8BlockwiseQTensorStorage if isinstance(cast.quantizer, Float8BlockQuantizer) else Float8TensorStorage
    return kind(values, cast)


def cast_of(tensor: Any, recipe: Recipe, top: float, scale: Any, *, is_weight: bool) -> Cast:
    """What casts a matrix [M, N] under a recipe; `scale` where its history says it."""
    dtype = DType(float(top))
    if scale is not None:
        return Cast(Float8Quantizer(dtype), (1.0 / scale).reshape(1))
    if recipe.float8_block_scaling():
        return Cast(Float8BlockQuantizer(dtype, 2 if is_weight else 1), _block_scales(tensor, top, is_weight))
    amax = tensor.detach().float().abs().amax() if tensor.numel() else torch.zeros(())
    return Cast(Float8CurrentScalingQuantizer(dtype), (1.0 / scale_of(amax, top)).reshape(1))


def _block_scales(matrix: Any, top: float, square: bool) -> Any:
    """Inverses of the scales, padded to multiples of 4: [M / 128, N / 128], or [N / 128, M] of rows."""
    rows, width = matrix.shape
    high = BLOCK if square else 1
    padded = torch.nn.functional.pad(matrix.detach().float(), (0, -width % BLOCK, 0, -rows % high))
    amax = padded.view(padded.shape[0] // high, high, padded.shape[1] // BLOCK, BLOCK).abs().amax(dim=(1, 3))
    scales = 1.0 / scale_of(amax, top, power_of_2=True)
    scales = scales if square else scales.t()
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
