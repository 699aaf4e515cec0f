"""The recipes and formats of `transformer_engine.common.recipe`, with the fields that the bridge sets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple


class _Largest(NamedTuple):
    """Largest value that can be held, forward and backward."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 formats; HYBRID is E4M3 forward and E5M2 backward."""

    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """How a product accumulates."""

    use_split_accumulator: bool = True


class Recipe:
    """How tensors are scaled into a low precision."""

    fp8_format: Format

    def delayed(self) -> bool:
        """Whether scales come from a history of amax values."""
        return isinstance(self, DelayedScaling)

    def float8_block_scaling(self) -> bool:
        """Whether there is one scale a block of 128."""
        return isinstance(self, Float8BlockScaling)


@dataclass
class DelayedScaling(Recipe):
    """One scale a tensor, from its amax history."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True


@dataclass
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from the tensor at hand."""

    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)


@dataclass
class Float8BlockScaling(Recipe):
    """One scale a block: 1 x 128 or 128 x 128."""

    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)


@dataclass
class MXFP8BlockScaling(Recipe):
    """One scale a block of 32 values; the double can make it, and refuses to run it as an H200 does."""

    fp8_format: Format = Format.E4M3


@dataclass
class NVFP4BlockScaling(Recipe):
    """4-bit values; the double can make it, and refuses to run it as an H200 does."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    fp8_format: Format = Format.E4M3
