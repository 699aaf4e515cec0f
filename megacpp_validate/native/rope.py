"""Rotary position embedding.

Source: Su et al. 2021, arXiv:2104.09864. The convention is rotate-half (GPT-NeoX; Transformer Engine's
`interleaved=False`): channel j and channel j + D/2 make one pair, turned by position x base^(-2j/D).
"""

from __future__ import annotations

from typing import Any

import torch


def rope_tables(
    length: int, head_dim: int, *, base: float = 10000.0, device: Any = None, dtype: Any = torch.float32
) -> tuple[Any, Any]:
    """Cosine and sine of every position's angles.

    Args:
        length: positions T, from 0.
        head_dim: D, even.
        base: of the wave lengths.
        device: where the tables lie.
        dtype: of the tables; fp64 where they serve as a reference.

    Returns:
        (cos, sin), each [T, D/2]. Angles are formed in fp64: in fp32 an angle of 10^5 would be off by 4e-3.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(
            f"a rotary embedding turns pairs of channels, and a head size of {head_dim} has none to pair; "
            f"use an even head size."
        )
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float64)
    angles = torch.outer(positions, base**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Any, cos: Any, sin: Any, *, offset: int = 0) -> Any:
    """Turn each pair of channels by the angle of its position.

    Args:
        x: [B, H, T, D], any floating dtype and strides.
        cos, sin: [at least offset + T, D/2], from `rope_tables`.
        offset: position of the first row of `x`, where earlier ones are kept elsewhere.

    Returns:
        [B, H, T, D] in the dtype of `x`, computed in the wider dtype of `x` and the tables.
    """
    length, width = x.shape[-2], x.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[1] != width:
        raise ValueError(
            f"rotary tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)} do not fit heads of size {width}: each "
            f"must be [T, {width // 2}]. Make them with rope_tables(length, {width})."
        )
    if offset < 0 or offset + length > cos.shape[0]:
        raise ValueError(
            f"positions {offset} to {offset + length - 1} are asked for, and the rotary tables hold {cos.shape[0]} "
            f"from 0. Make them for the longest sequence."
        )
    cos, sin = cos[offset : offset + length], sin[offset : offset + length]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
