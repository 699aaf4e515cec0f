"""Emulated FP8: values rounded to torch's float8 types under a scale, kept in fp32."""

from __future__ import annotations

from typing import Any

import torch

from ..recipes import DelayedScaling, Recipe

BLOCK = 128
_TYPES = {448: torch.float8_e4m3fn, 57344: torch.float8_e5m2}


def largest(recipe: Recipe, *, forward: bool) -> float:
    """Largest value of the format that a pass uses."""
    return recipe.fp8_format.value.max_fwd if forward else recipe.fp8_format.value.max_bwd


def round_scaled(tensor: Any, scale: Any, top: float) -> Any:
    """Values [...] times `scale`, rounded to the format whose largest value is `top`, divided again; fp32."""
    scaled = (tensor.float() * scale).clamp(-top, top)
    return scaled.to(_TYPES[int(top)]).float() / scale


def scale_of(amax: Any, top: float, *, power_of_2: bool = False) -> Any:
    """`top` / amax, 1 where there is nothing to scale."""
    # `top / amax` would be a reciprocal and a product: off by its last bit, which turns ties of the rounding over.
    exact = torch.full_like(amax, top) / amax
    scale = torch.where((amax > 0) & amax.isfinite(), exact, torch.ones_like(amax))
    scale = scale.clamp_max(torch.finfo(torch.float32).max)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale


def round_tensor(tensor: Any, top: float) -> Any:
    """One scale for the whole tensor, from itself."""
    if tensor.numel() == 0:
        return tensor.float()
    return round_scaled(tensor, scale_of(tensor.float().abs().amax(), top), top)


def round_blocks(matrix: Any, rows: int, columns: int, top: float) -> Any:
    """One scale, a power of 2, a block of `rows` x `columns` of a matrix [M, N]; blocks at the edges are smaller."""
    height, width = matrix.shape
    if matrix.numel() == 0:
        return matrix.float()
    padded = torch.nn.functional.pad(matrix.float(), (0, -width % columns, 0, -height % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = scale_of(blocks.abs().amax(dim=(1, 3), keepdim=True), top, power_of_2=True)
    return round_scaled(blocks, scale, top).view(padded.shape)[:height, :width]


class DelayedState:
    """Scales of one module and direction, as `fp8_meta["scaling_fwd"]` holds them.

    Attributes:
        amax_history: [history, tensors] fp32; row 0 collects until the next update.
        scale: [tensors] fp32; 1 until the first update.
    """

    def __init__(self, recipe: DelayedScaling, count: int, *, forward: bool, device: Any) -> None:
        self.recipe = recipe
        self.top = largest(recipe, forward=forward)
        self.amax_history = torch.zeros(recipe.amax_history_len, count, device=device)
        self.scale = torch.ones(count, device=device)

    def round(self, tensor: Any, index: int) -> Any:
        """Round with the scale of past steps and take note of this tensor's amax."""
        if tensor.numel() == 0:
            return tensor.float()
        amax = tensor.detach().float().abs().amax()
        self.amax_history[0, index] = torch.maximum(self.amax_history[0, index], amax)
        return round_scaled(tensor, self.scale[index].clone(), self.top)

    def update(self) -> None:
        """New scales from the history, which moves on by one row."""
        newest = self.recipe.amax_compute_algo == "most_recent"
        amax = self.amax_history[0].clone() if newest else self.amax_history.amax(dim=0)
        fresh = scale_of(amax, self.top) / 2.0**self.recipe.margin
        self.scale.copy_(torch.where((amax > 0) & amax.isfinite(), fresh, self.scale))
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0].zero_()
