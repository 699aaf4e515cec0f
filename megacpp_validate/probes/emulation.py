"""The same low precision in plain torch: linear layers whose operands are rounded as each FP8 recipe rounds them.

This is the "native PyTorch in the same low precision" that FP8 outputs are held to, and the source of the roundings
from which their bounds are derived. Products are summed in fp64, so what is left is the recipe's own error.

As Transformer Engine 2.12 to 2.20 do it (`pytorch/quantization.py`, `common/recipe`, `custom_recipes/reference_*`):

| recipe  | activations      | weights       | gradients        | scale                                           |
|---------|------------------|---------------|------------------|-------------------------------------------------|
| delayed | E4M3, a tensor   | E4M3, a tensor| E5M2, a tensor   | largest / max of the amax history of past steps |
| current | E4M3, a tensor   | E4M3, a tensor| E5M2, a tensor   | largest / amax of the tensor at hand            |
| block   | E4M3, 1 x 128    | E4M3, 128x128 | E4M3, 1 x 128    | as current, a block, rounded down to 2^n        |
| mxfp8   | E4M3, 1 x 32     | E4M3, 1 x 32  | E4M3, 1 x 32     | the same (E8M0, OCP MX 1.0)                     |

Blocks run along the sum of the product at hand, so block recipes quantise an operand anew for each product that sums
over another axis. Delayed scaling starts with scale 1 and an empty history, and the history takes effect with the
next step: a probe that compares under it must first run one whole step (forward and backward, in a scope of its own)
on the very tensors that it compares. Then the delayed scale is the current one, which is what is taken here where no
`scales` are given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import torch

from ..native import mlp
from ..native.norms import rms_norm
from .bounds import Roundings

Recipe = Literal["delayed", "current", "block", "mxfp8"]
Product = Literal["forward", "dgrad", "wgrad"]
FormatName = Literal["e4m3", "e5m2"]

EMULATED: Final[tuple[Recipe, ...]] = get_args(Recipe)

DTYPES: Final[dict[FormatName, Any]] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST: Final[dict[FormatName, float]] = {"e4m3": 448.0, "e5m2": 57344.0}

# Formats of the two operands: activations and weight; gradient and weight; gradient and activations.
FORWARD_FORMATS: Final[dict[Recipe, tuple[FormatName, FormatName]]] = dict.fromkeys(EMULATED, ("e4m3", "e4m3"))
DGRAD_FORMATS: Final[dict[Recipe, tuple[FormatName, FormatName]]] = {
    "delayed": ("e5m2", "e4m3"),
    "current": ("e5m2", "e4m3"),
    "block": ("e4m3", "e4m3"),
    "mxfp8": ("e4m3", "e4m3"),
}
WGRAD_FORMATS: Final[dict[Recipe, tuple[FormatName, FormatName]]] = dict(DGRAD_FORMATS)
FORMATS: Final[dict[Product, dict[Recipe, tuple[FormatName, FormatName]]]] = {
    "forward": FORWARD_FORMATS,
    "dgrad": DGRAD_FORMATS,
    "wgrad": WGRAD_FORMATS,
}

# Hopper's FP8 matrix instruction sums 32 products and its accumulator, aligned to the largest and cut to about 14
# bits (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2): 33 cuts of at most 2^-13, together as much as
# four roundings to 11 bits. With the split accumulator the partial sums go to fp32 after 128 products at the latest.
PRODUCTS_OF_AN_INSTRUCTION: Final = 32
ROUNDINGS_OF_AN_INSTRUCTION: Final = ("tf32", 4)


class Block(NamedTuple):
    """Size of the blocks that share a scale: rows by values along the sum."""

    rows: int
    along: int


BLOCKS: Final[dict[Recipe, dict[Literal["rows", "weight"], Block]]] = {
    "block": {"rows": Block(1, 128), "weight": Block(128, 128)},
    "mxfp8": {"rows": Block(1, 32), "weight": Block(1, 32)},
}


def steps_of(recipe: str | None) -> int:
    """Passes until the scales are those of the tensors at hand: delayed scaling takes them from the step before."""
    return 2 if recipe == "delayed" else 1


@dataclass(frozen=True)
class DelayedScales:
    """The scales that delayed scaling uses in one step, as its history has them; all 1 in the very first one."""

    rows: float = 1.0
    weight: float = 1.0
    gradient: float = 1.0


def scale_of(amax: Any, name: FormatName, *, power_of_two: bool = False) -> Any:
    """The scale that brings `amax` to the largest value of a format, as an fp32 tensor of the shape of `amax`.

    An amax of zero gives 1; one so small that the scale would overflow gives the largest fp32. A scale that must be
    a power of two is rounded down, so that nothing saturates.
    """
    amax = amax.float()
    scale = torch.full_like(amax, LARGEST[name]) / amax  # a number / a tensor is its reciprocal times the number
    scale = torch.where(torch.isinf(scale), torch.finfo(torch.float32).max, scale)
    if power_of_two:
        exponent = torch.frexp(scale).exponent - 1
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def round_to_fp8(values: Any, name: FormatName, *, block: Block | None = None, scale: float | None = None) -> Any:
    """What is left of `values` [M, K] after a cast to FP8 and back, in fp64.

    Args:
        values: any floating dtype; blocks run along K.
        name: the format.
        block: one scale for each of these blocks, a power of two; one scale for the whole tensor without it.
        scale: this scale instead of the one that the tensor at hand calls for; values beyond the range saturate.
    """
    if values.numel() == 0:
        return values.double()
    plain = values.float()
    if scale is not None:
        scales = torch.full((1, 1), scale, dtype=torch.float32, device=values.device)
    elif block is None:
        scales = scale_of(plain.abs().amax(), name).reshape(1, 1)
    else:
        scales = _scale_of_each(plain, block, name)
    scaled = (plain * scales).clamp(-LARGEST[name], LARGEST[name])  # the vendor's cast saturates, torch's gives NaN
    return scaled.to(DTYPES[name]).double() / scales.double()


def _scale_of_each(plain: Any, block: Block, name: FormatName) -> Any:
    """Scales [M, K], each value with that of its block; the last blocks of an odd size are smaller."""
    rows, width = plain.shape
    high, wide = math.ceil(rows / block.rows), math.ceil(width / block.along)
    padded = torch.nn.functional.pad(plain.abs(), (0, wide * block.along - width, 0, high * block.rows - rows))
    amax = padded.reshape(high, block.rows, wide, block.along).amax(dim=(1, 3))
    scales = scale_of(amax, name, power_of_two=True)
    return scales.repeat_interleave(block.rows, 0)[:rows].repeat_interleave(block.along, 1)[:, :width]


class _EmulatedLinear(torch.autograd.Function):
    """y = x W^T + b, dx = g W, dW = g^T x, each operand rounded as the recipe does for that product."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, bias: Any, recipe: Recipe, scales: DelayedScales | None) -> Any:
        ctx.recipe, ctx.scales, ctx.bias_dtype = recipe, scales, None if bias is None else bias.dtype
        ctx.save_for_backward(rows, weight)
        x_format, w_format = FORWARD_FORMATS[recipe]
        x = _round(rows, x_format, recipe, "rows", None if scales is None else scales.rows)
        w = _round(weight, w_format, recipe, "weight", None if scales is None else scales.weight)
        out = x @ w.T
        if bias is not None:
            out = out + bias.double()
        return out.to(rows.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        scales: DelayedScales | None = ctx.scales
        of_rows, of_weight, of_gradient = (
            (None, None, None) if scales is None else (scales.rows, scales.weight, scales.gradient)
        )
        g_format, w_format = DGRAD_FORMATS[recipe]
        g = _round(gradient, g_format, recipe, "rows", of_gradient)
        w = _round(weight.T, w_format, recipe, "weight", of_weight)
        g_format, x_format = WGRAD_FORMATS[recipe]
        g_down = _round(gradient.T, g_format, recipe, "rows", of_gradient)
        x_down = _round(rows.T, x_format, recipe, "rows", of_rows)
        bias = None if ctx.bias_dtype is None else gradient.double().sum(0).to(ctx.bias_dtype)
        return (g @ w.T).to(rows.dtype), (g_down @ x_down.T).to(weight.dtype), bias, None, None


def _round(values: Any, name: FormatName, recipe: Recipe, kind: Literal["rows", "weight"], scale: float | None) -> Any:
    block = BLOCKS[recipe][kind] if recipe in BLOCKS else None
    return round_to_fp8(values, name, block=block, scale=scale if recipe == "delayed" else None)


def emulated_linear(
    rows: Any, weight: Any, recipe: Recipe, bias: Any = None, *, scales: DelayedScales | None = None
) -> Any:
    """A linear layer under an FP8 recipe, differentiable.

    Args:
        rows: [..., K], any floating dtype; the output has the same.
        weight: [N, K].
        recipe: which one; delayed scaling without `scales` is taken after a warm-up on these very tensors.
        bias: [N], added before the output is rounded.
        scales: of delayed scaling, where they come from other tensors.

    Returns:
        [..., N].
    """
    out = _EmulatedLinear.apply(rows.reshape(-1, rows.shape[-1]), weight, bias, recipe, scales)
    return out.reshape(*rows.shape[:-1], weight.shape[0])


def emulated_mlp(given: Mapping[str, Any], recipe: Recipe, *, activation: Any, eps: float) -> Any:
    """RMSNorm, up-projection, activation, down-projection of "input" [..., D] under an FP8 recipe, differentiable."""
    normed = rms_norm(given["input"], given["layer_norm_weight"], eps=eps)
    up = emulated_linear(normed, given["fc1_weight"], recipe)
    acted = mlp.gated_activation(up, activation) if mlp.is_gated(activation) else mlp.activation(up, activation)
    return emulated_linear(acted, given["fc2_weight"], recipe)


def emulated_grouped(rows: Any, weights: Any, counts: Sequence[int], recipe: Recipe) -> Any:
    """A grouped linear layer under an FP8 recipe: each expert has its own scales, as in Transformer Engine.

    Args:
        rows: [R, K], sorted by expert.
        weights: [E, N, K].
        counts: rows of each expert; they sum to R.
        recipe: as for `emulated_linear`.

    Returns:
        [R, N].
    """
    parts = torch.split(rows, list(counts))
    return torch.cat([emulated_linear(part, weight, recipe) for part, weight in zip(parts, weights, strict=True)])


def operand_roundings(
    recipe: Recipe, which: Product, k: int, out: str = "bf16", *, independent: int | None = None
) -> Roundings:
    """What is rounded on the way to one product of a linear layer under a recipe.

    Args:
        recipe: which one.
        which: the output, the gradient of the input, or that of the weight.
        k: number of products in a sum: K of the forward product, N of dgrad, rows of wgrad.
        out: format of the result.
        independent: values of the smaller operand, where the result has more.
    """
    first, second = FORMATS[which][recipe]
    operands: tuple[tuple[str, int], ...] = ((first, 2),) if first == second else ((first, 1), (second, 1))
    split = not (which == "forward" and recipe in ("delayed", "current"))
    summed = min(k, 128) if split else k
    cut, cuts = ROUNDINGS_OF_AN_INSTRUCTION
    steps = (*operands, (cut, cuts * math.ceil(summed / PRODUCTS_OF_AN_INSTRUCTION)), (out, 1))
    why = (
        f"both operands of {which} rounded by {recipe} scaling ({first}, {second}); Hopper's FP8 accumulator keeps "
        f"about 14 bits ({'promoted to fp32 every 128 products' if split else 'never promoted: fast accumulation'}, "
        f"arXiv:2412.19437), which is 4 roundings to 11 bits for each 32 products; rounded to {out}"
    )
    return Roundings(steps, k, why=why, independent=independent)
