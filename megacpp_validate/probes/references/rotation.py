"""The rotary embedding in fp64, one pair of channels and one position at a time.

Source: Su et al. 2021, arXiv:2104.09864, with rotate-half pairs: channel j and channel j + D/2, as in GPT-NeoX.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def angle(position: int, pair: int, width: int, base: float) -> float:
    """By how much the pair (j, j + D/2) of a head of this width is turned at a position, in radians."""
    return position / math.pow(base, 2.0 * pair / width)


def rotary_tables(length: int, width: int, base: float) -> tuple[Any, Any]:
    """Cosine and sine of every angle, each [T, D/2], fp64."""
    angles = [[angle(position, pair, width, base) for pair in range(width // 2)] for position in range(length)]
    made = [
        torch.tensor([[function(one) for one in row] for row in angles], dtype=torch.float64)
        for function in (math.cos, math.sin)
    ]
    return made[0], made[1]


def rotated(rows: Any, base: float, offset: int = 0) -> Any:
    """[B, H, T, D] in fp64, whose first row is at the position `offset`, turned; the same shape."""
    length, width = rows.shape[2:]
    out, half = torch.empty_like(rows), rows.shape[3] // 2
    for place in range(length):
        for pair in range(half):
            turn = angle(place + offset, pair, width, base)
            first, second = rows[:, :, place, pair], rows[:, :, place, pair + half]
            out[:, :, place, pair] = first * math.cos(turn) - second * math.sin(turn)
            out[:, :, place, pair + half] = second * math.cos(turn) + first * math.sin(turn)
    return out
