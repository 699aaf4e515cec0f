"""The trajectory loss: hidden states of a sequence are to move along locally straight lines.

Source: Huang, LeCun and Balestriero 2026, "Semantic Tube Prediction: Beating LLM Data Efficiency with JEPA",
arXiv:2602.22617, section 3: the mean of 1 - cos(h_t - h_r, h_r - h_s) over positions s < r < t. There the positions are
drawn at random; here they are equally spaced, so that two runs of one seed take the same ones, whatever else draws.
"""

from __future__ import annotations

from typing import Any, Final

import torch

STRIDE: Final = 8  # positions from s to r and from r to t, of a sequence that is long enough


def trajectory_loss(rows: Any, *, stride: int = STRIDE) -> Any:
    """Mean of 1 - cos(h_r - h_s, h_t - h_r) over equally spaced s < r < t: 0 where all goes straight on, 2 where it
    turns back.

    A step that is no longer than the rounding of the states that it lies between has no direction: it counts 0, and has
    no gradient. The number of triples does not depend on the values, so shares of ranks add up to the whole mean.

    Under sequence parallelism a rank sees the positions that lie on it, and none of the triples that reach over to
    another rank: the loss is that of shorter sequences, not that of one rank.

    Args:
        rows: [B, T, hidden], any floating dtype.
        stride: positions of a step; as many as leave a triple where the sequence is too short for it.

    Returns:
        [], in fp32 at least; 0 for fewer than 3 positions, with a gradient of zeros.

    Raises:
        ValueError: rows of another rank, or a stride below 1.
    """
    if rows.dim() != 3 or stride < 1:
        raise ValueError(
            f"the trajectory loss takes rows [B, T, hidden] and a stride from 1 up, and got {tuple(rows.shape)} and "
            f"{stride}. Next step: pass the residual stream, tokens not flattened."
        )
    wide = torch.promote_types(rows.dtype, torch.float32)
    if rows.shape[1] < 3 or rows.shape[0] == 0:
        return rows.to(wide).sum() * 0
    stride = min(stride, (rows.shape[1] - 1) // 2)
    points = rows[:, ::stride].to(wide)
    steps = points.diff(dim=1)
    lengths = steps.square().sum(-1)
    sizes = points.detach().square().sum(-1)
    moved = lengths > torch.finfo(rows.dtype).eps ** 2 * torch.maximum(sizes[:, 1:], sizes[:, :-1])
    # One where there is no direction: the branch that is not taken has a finite gradient too, which is then zeroed.
    inverse = torch.where(moved, lengths, 1).rsqrt()
    cosines = (steps[:, 1:] * steps[:, :-1]).sum(-1) * inverse[:, 1:] * inverse[:, :-1]
    return torch.where(moved[:, 1:] & moved[:, :-1], 1 - cosines, 0).mean()
