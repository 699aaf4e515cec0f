"""The state of delayed scaling, call by call, as its recipe says: amax histories and scales, in fp64.

Transformer Engine has two ways to bring the state up to date, which differ where nothing but zeros was seen:

- "fused", what it takes by default: `kernel_bulk` of `common/recipe/delayed_scaling.cu`. Where the amax of the call is
  zero it leaves the history as it is, and the scale too. A NaN in the history does not count (`fmaxf`). Read in
  NVIDIA/TransformerEngine at 6b71a0ad (2024); releases ship it compiled.
- "python", with NVTE_UNFUSED_FP8_UPDATE=1: `_amax_and_scale_update` of `pytorch/quantization.py`, read in 2.12.0 and
  2.20.2. A zero goes into the history like any other amax. A NaN in it stands for the whole of it.

Both: the amax of the call joins the history as its newest row, row 0 is emptied for the next call, the oldest row drops
out and counts for the last time, and the scale is largest / amax, not rounded to a power of two
(`use_power_2_scales` belongs to current scaling). An amax of zero, or one that is not finite, leaves the scale as it
was; one so small that the scale would overflow gives the largest fp32. In forward passes a call is one scope, in
backward passes one backward pass: with gradient accumulation, each micro-batch is a call of its own.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

Update = Literal["fused", "python"]

LARGEST_FP32: Final = 3.4028234663852886e38


@dataclass(frozen=True)
class DelayedRule:
    """What a recipe fixes of a direction.

    Attributes:
        largest: largest value of the format: 448 of E4M3, 57344 of E5M2.
        update: which of the two ways brings the state up to date.
    """

    largest: float
    update: Update = "fused"


@dataclass(frozen=True)
class DelayedTensors:
    """The state of a layer's tensors in one direction.

    Attributes:
        history: [H, N] fp64; the newest call last, row 0 empty between calls.
        scale: [N] fp64, each a value of fp32: what the next call multiplies by before the cast.
    """

    history: Any
    scale: Any


def new_state(length: int, tensors: int) -> DelayedTensors:
    """The state before the first call: nothing seen, scales of 1.

    Args:
        length: H, calls that are remembered.
        tensors: N.

    Raises:
        ValueError: a history that remembers nothing.
    """
    if length < 1:
        raise ValueError(f"an amax history of {length} steps remembers nothing. Next step: 1 or more.")
    return DelayedTensors(torch.zeros(length, tensors, dtype=torch.float64), torch.ones(tensors, dtype=torch.float64))


def next_state(state: DelayedTensors, amax: Any, rule: DelayedRule) -> DelayedTensors:
    """The state after a call.

    Args:
        state: before it.
        amax: [N], largest absolute value of each tensor in the call, over all ranks that share the scale.
        rule: of the recipe.
    """
    seen = state.history.clone()
    seen[0] = amax.double()
    top = (torch.where(seen.isnan(), 0.0, seen) if rule.update == "fused" else seen).amax(dim=0)
    moved = seen.roll(-1, 0)
    moved[0] = 0.0
    if rule.update == "fused":
        nothing = seen[0] == 0.0
        moved = torch.where(nothing, state.history, moved)
        top = torch.where(nothing, 0.0, top)
    return DelayedTensors(moved, _scale(top, state.scale, rule))


def _scale(amax: Any, before: Any, rule: DelayedRule) -> Any:
    """[N] fp64, rounded to fp32: 53 bits are enough that a quotient rounded twice is the one rounded once."""
    usable = amax.isfinite() & (amax > 0.0)
    quotient = rule.largest / torch.where(usable, amax, 1.0)
    return torch.where(usable, quotient.clamp_max(LARGEST_FP32).float().double(), before)
