"""The same low precision in plain torch: linear layers whose operands are rounded as each recipe rounds them.

This is the "native PyTorch in the same low precision" that FP8 outputs are held to, and the source of the roundings
from which their bounds are derived. Products are summed in fp64, so what is left is the recipe's own error.

As Transformer Engine 2.12 to 2.20 do it (`pytorch/quantization.py`, `common/recipe`, `custom_recipes/reference_*`):

| recipe  | activations      | weights       | gradients        | scale                                           |
|---------|------------------|---------------|------------------|-------------------------------------------------|
| delayed | E4M3, a tensor   | E4M3, a tensor| E5M2, a tensor   | largest / max of the amax history of past steps |
| current | E4M3, a tensor   | E4M3, a tensor| E5M2, a tensor   | largest / amax of the tensor at hand            |
| block   | E4M3, 1 x 128    | E4M3, 128x128 | E4M3, 1 x 128    | as current, a block, rounded down to 2^n        |
| mxfp8   | E4M3, 1 x 32     | E4M3, 1 x 32  | E4M3, 1 x 32     | the same (E8M0)                                 |
| nvfp4   | E2M1, 1 x 16     | E2M1, 16 x 16 | E2M1, 1 x 16     | a block's in E4M3, times one of the tensor      |

Blocks run along the sum of the product at hand, so block recipes quantise an operand anew for each product that sums
over another axis. Delayed scaling starts with scale 1 and an empty history, and the history takes effect with the
next step: a probe that compares under it must first run one whole step (forward and backward, in a scope of its own)
on the very tensors that it compares. Then the delayed scale is the current one, which is what is taken here where no
`scales` are given.

MXFP8 (OCP Microscaling Formats (MX) Specification 1.0, section 5.2): the specification's own conversion (6.3) takes
2^(floor(log2 amax) - 8) for a block, so that what is above 448 of it saturates. Transformer Engine rounds the E8M0
scale up instead, and nothing saturates (Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8",
arXiv:2506.08027, section 3); that is what is emulated.

NVFP4 (NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, appendices B and C;
`custom_recipes/reference_nvfp4.py`): the fp32 scale of the tensor brings its amax to 448 x 6, the scale of a block is
its amax / 6 times that, rounded to the nearest E4M3, and values beyond 6 saturate. Gradients are rounded
stochastically. Both operands of the weight gradient are turned by a Hadamard matrix of 16 with fixed signs first,
which leaves their product as it is.

The state of delayed scaling, call by call, in fp64. Transformer Engine has two ways to bring the state up to date,
which differ where nothing but zeros was seen:

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

Last, how often something is rounded on the way to each tensor of a layer. Relative errors of independent roundings add
as squares, through linear maps unchanged. Where two factors meet, their counts add. Through SiLU and GELU of values of
size 1 a count grows by less than a tenth (E[silu'^2] / E[silu^2] = 1.07); their derivatives pass on less than it was.
On a residual stream the errors of a part count by its share in the squared norm of the sum, which the reference knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .bounds import Roundings
from .references import EXPANDED, Shares

Recipe = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
Product = Literal["forward", "dgrad", "wgrad"]
FormatName = Literal["e4m3", "e5m2", "e2m1"]
Side = Literal["rows", "weight"]

# With bounds for whole layers: that of several products in 4 bits would let zeros pass.
EMULATED: Final[tuple[Recipe, ...]] = get_args(Recipe)[:-1]

DTYPES: Final[dict[FormatName, Any]] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST: Final[dict[FormatName, float]] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}

# Formats of the two operands of a product: activations and weight; gradient and weight; gradient and activations.
HYBRID: Final[tuple[FormatName, FormatName]] = ("e5m2", "e4m3")
NARROW: Final[tuple[FormatName, FormatName]] = ("e4m3", "e4m3")
FOUR_BITS: Final[tuple[FormatName, FormatName]] = ("e2m1", "e2m1")
BACKWARD: Final[dict[Recipe, tuple[FormatName, FormatName]]] = {
    "delayed": HYBRID, "current": HYBRID, "block": NARROW, "mxfp8": NARROW, "nvfp4": FOUR_BITS
}  # fmt: skip
FORWARD: Final = {**dict.fromkeys(EMULATED, NARROW), "nvfp4": FOUR_BITS}
FORMATS: Final = {"forward": FORWARD, "dgrad": BACKWARD, "wgrad": BACKWARD}

# Hopper's FP8 matrix instruction sums 32 products and its accumulator, aligned to the largest and cut to about 14
# bits (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2): 33 cuts of at most 2^-13, together as much as
# four roundings to 11 bits. With the split accumulator the partial sums go to fp32 after 128 products at the latest.
PRODUCTS_OF_AN_INSTRUCTION: Final = 32
ROUNDINGS_OF_AN_INSTRUCTION: Final = ("tf32", 4)
BLACKWELLS: Final[tuple[Recipe, ...]] = ("mxfp8", "nvfp4")  # whose tensor cores accumulate in fp32
# A rounding in 4 bits is off by a ninth of the value. The error of one product of many values is within a tenth of its
# expectation, and 1.3 times that is allowed instead of twice: the double would not tell x0.5 from it.
ONE_PRODUCT: Final = 0.65


class Block(NamedTuple):
    """Size of the blocks that share a scale: rows by values along the sum."""

    rows: int
    along: int


BLOCKS: Final[dict[Recipe, dict[Side, Block]]] = {
    "block": {"rows": Block(1, 128), "weight": Block(128, 128)},
    "mxfp8": {"rows": Block(1, 32), "weight": Block(1, 32)},
    "nvfp4": {"rows": Block(1, 16), "weight": Block(16, 16)},
}


def steps_of(recipe: str | None) -> int:
    """Passes until the scales are those of the tensors at hand: delayed scaling takes them from the step before."""
    return 2 if recipe == "delayed" else 1


class DelayedScales(NamedTuple):
    """The scales that delayed scaling uses in one step, as its history has them; all 1 in the very first one."""

    rows: float | None = 1.0
    weight: float | None = 1.0
    gradient: float | None = 1.0


NO_SCALES: Final = DelayedScales(None, None, None)


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


def scale_twice(amax: Any) -> Any:
    """NVFP4: the scales of blocks with these amax, [M, K / 16] fp32, from that of their tensor; without an E4M3 one 0.

    In the order of `NVFP4QuantizerRef`, whose quotients are rounded to fp32.
    """
    limit = torch.finfo(torch.float32).max
    whole = (torch.full_like(amax, LARGEST["e4m3"] * LARGEST["e2m1"]) / amax.max()).clamp_max(limit)
    stored = (amax * (whole * torch.reciprocal(torch.full_like(amax, LARGEST["e2m1"])))).clamp_max(LARGEST["e4m3"])
    return (1.0 / (stored.to(DTYPES["e4m3"]).float() * (1.0 / whole))).clamp_max(limit)


def round_to_fp4(values: Any, *, stochastic: bool = False) -> Any:
    """E2M1 of fp64 values from -6 to 6: the nearest, ties to even, or one of its two neighbours by its distance."""
    step = torch.ldexp(torch.full_like(values, 0.5), (torch.frexp(values).exponent - 1).clamp_min(0))
    steps = values / step
    return step * (torch.floor(steps + torch.rand_like(steps)) if stochastic else torch.round(steps))


def round_to_fp8(
    values: Any, name: FormatName, *, block: Block | None = None, scale: float | None = None,
    scale_blocks: Callable[[Any], Any] | None = None, stochastic: bool = False,
) -> Any:  # fmt: skip
    """What is left of `values` [M, K] after a cast to FP8 or FP4 and back, in fp64.

    Args:
        values: any floating dtype; blocks run along K.
        name: the format.
        block: one scale for each of these blocks; one scale for the whole tensor without it.
        scale: this scale instead of the one that the tensor at hand calls for; values beyond the range saturate.
        scale_blocks: amax of blocks -> their scales; powers of two without it.
        stochastic: FP4 alone: to one of both neighbours.
    """
    if values.numel() == 0:
        return values.double()
    plain = values.float()
    if scale is not None:
        scales = torch.full((1, 1), scale, dtype=torch.float32, device=values.device)
    elif block is None:
        scales = scale_of(plain.abs().amax(), name).reshape(1, 1)
    else:  # the last blocks of an odd size are smaller
        rows, width = plain.shape
        filled = functional.pad(plain.abs(), (0, -width % block.along, 0, -rows % block.rows))
        amax = filled.unflatten(1, (-1, block.along)).unflatten(0, (-1, block.rows)).amax(dim=(1, 3))
        scales = scale_blocks(amax) if scale_blocks else scale_of(amax, name, power_of_two=True)
        scales = scales.repeat_interleave(block.rows, 0)[:rows].repeat_interleave(block.along, 1)[:, :width]
    scaled = (plain * scales).clamp(-LARGEST[name], LARGEST[name])  # the vendor's cast saturates, torch's gives NaN
    if name == "e2m1":
        return round_to_fp4(scaled.double(), stochastic=stochastic) / scales.double()
    return scaled.to(DTYPES[name]).double() / scales.double()


# The first row of the Hadamard matrix with TE's signs (`get_wgrad_sign_vector`).
SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def turn(values: Any) -> Any:
    """NVFP4's random Hadamard transform of each 16 values along the sum; [M, K] fp32, K a multiple of 16."""
    pair = matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    for _ in range(3):
        matrix = torch.kron(pair, matrix)
    signed = torch.tensor(SIGNS)[:, None] * matrix / 4
    return (values.float().unflatten(1, (-1, len(SIGNS))) @ signed.to(values.device)).flatten(1)


class _EmulatedLinear(torch.autograd.Function):
    """y = x W^T + b, dx = g W, dW = g^T x, each operand rounded as the recipe does for that product."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, bias: Any, recipe: Recipe, scales: DelayedScales) -> Any:
        ctx.recipe, ctx.scales, ctx.bias_dtype = recipe, scales, None if bias is None else bias.dtype
        ctx.save_for_backward(rows, weight)
        x_format, w_format = FORMATS["forward"][recipe]
        x = cast(rows, x_format, recipe, scale=scales.rows)
        w = cast(weight, w_format, recipe, "weight", scale=scales.weight)
        out = x @ w.T
        if bias is not None:
            out = out + bias.double()
        return out.to(rows.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        recipe, scales = ctx.recipe, ctx.scales
        g_format, w_format = FORMATS["dgrad"][recipe]
        g = cast(gradient, g_format, recipe, scale=scales.gradient, stochastic=True)
        w = cast(weight.T, w_format, recipe, "weight", scale=scales.weight)
        across, down = (turn(one.T) if recipe == "nvfp4" else one.T for one in (gradient, rows))
        g_down = cast(across, g_format, recipe, scale=scales.gradient, stochastic=True)
        x_down = cast(down, FORMATS["wgrad"][recipe][1], recipe, scale=scales.rows)
        bias = None if ctx.bias_dtype is None else gradient.double().sum(0).to(ctx.bias_dtype)
        return (g @ w.T).to(rows.dtype), (g_down @ x_down.T).to(weight.dtype), bias, None, None


def cast(
    values: Any, name: FormatName, recipe: Recipe, kind: Side = "rows", *, scale: float | None = None,
    stochastic: bool = False,
) -> Any:  # fmt: skip
    """`round_to_fp8` in the blocks of a recipe; `scale` is that of delayed scaling, `stochastic` of NVFP4 alone."""
    block, scale_blocks = BLOCKS.get(recipe, {}).get(kind), scale_twice if recipe == "nvfp4" else None
    scale = scale if recipe == "delayed" else None
    return round_to_fp8(values, name, block=block, scale=scale, scale_blocks=scale_blocks, stochastic=stochastic)


def emulated_linear(
    rows: Any, weight: Any, recipe: Recipe, bias: Any = None, *, scales: DelayedScales = NO_SCALES
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


class Emulated(TorchFunctionMode):
    """While inside, every linear layer of plain PyTorch is computed under an FP8 recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            rows, weight, *bias = args
            return emulated_linear(rows, weight, self.recipe, *bias)
        return func(*args, **(kwargs or {}))


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
    if recipe in BLACKWELLS:
        if recipe == "nvfp4" and which != "forward":
            operands = ((first, 3),)  # a stochastic rounding has twice the variance of one to the nearest
        why = f"both operands of {which} rounded by {recipe} ({first}; 4-bit gradients stochastically); sums in fp32"
        one = ONE_PRODUCT if recipe == "nvfp4" else 1.0
        return Roundings((*operands, (out, 1)), k, amplification=one, why=why, independent=independent)
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


# --- delayed scaling ------------------------------------------------------------------------------------------------


Update = Literal["fused", "python"]

LARGEST_FP32: Final = 3.4028234663852886e38


class DelayedTensors(NamedTuple):
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
    """
    return DelayedTensors(torch.zeros(length, tensors, dtype=torch.float64), torch.ones(tensors, dtype=torch.float64))


def next_state(state: DelayedTensors, amax: Any, largest: float, update: Update = "fused") -> DelayedTensors:
    """The state after a call.

    Args:
        state: before it.
        amax: [N], largest absolute value of each tensor in the call, over all ranks that share the scale.
        largest: largest value of the format: 448 of E4M3, 57344 of E5M2.
        update: which of the two ways brings the state up to date.
    """
    seen = state.history.clone()
    seen[0] = amax.double()
    top = (torch.where(seen.isnan(), 0.0, seen) if update == "fused" else seen).amax(dim=0)
    moved = seen.roll(-1, 0)
    moved[0] = 0.0
    if update == "fused":
        nothing = seen[0] == 0.0
        moved = torch.where(nothing, state.history, moved)
        top = torch.where(nothing, 0.0, top)
    # 53 bits are enough that a quotient rounded twice is the one rounded once.
    usable = top.isfinite() & (top > 0.0)
    quotient = largest / torch.where(usable, top, 1.0)
    scale = torch.where(usable, quotient.clamp_max(LARGEST_FP32).float().double(), state.scale)
    return DelayedTensors(moved, scale)


# --- roundings on the way to each tensor of a layer -----------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """What a layer rounds to.

    Attributes:
        stored: format of every tensor that is written.
        operand: format that activations and weights are rounded to for a product; empty where they are not.
        gradient: the same for gradients.
        recipe: the FP8 recipe, if any.
        smallest: how many values the smallest rounded operand holds: no tensor has more independent errors.
    """

    stored: str
    operand: str = ""
    gradient: str = ""
    recipe: Recipe | None = None
    smallest: int | None = None


def precision_of(stored: str, *, tf32: bool = False, recipe: Recipe | None = None) -> Precision:
    """How a layer computes whose tensors are `stored` so.

    Args:
        stored: "fp32" or "bf16".
        tf32: whether fp32 products are taken in TF32, as Transformer Engine's are on a GPU.
        recipe: the FP8 recipe of its products.
    """
    if recipe is not None:
        gradient, operand = FORMATS["dgrad"][recipe]
        return Precision(stored, operand, gradient, recipe)
    return Precision(stored, "tf32", "tf32") if tf32 and stored == "fp32" else Precision(stored)


@dataclass(frozen=True)
class Count:
    """How often something is rounded before one tensor is there, itself included; a share of a sum counts in part.

    Attributes:
        stored: tensors that were written.
        operands: activations and weights that went into products.
        gradients: gradients that went into products.
    """

    stored: float = 0.0
    operands: float = 0.0
    gradients: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(self.stored + other.stored, self.operands + other.operands, self.gradients + other.gradients)

    def __rmul__(self, factor: float) -> Count:
        return Count(factor * self.stored, factor * self.operands, factor * self.gradients)

    def roundings(self, precision: Precision, length: int, why: str) -> Roundings:
        """As a bound takes it, with sums of `length` products."""
        stored, operands, gradients = (math.ceil(one) for one in (self.stored, self.operands, self.gradients))
        steps = [(precision.stored, stored)]
        if precision.operand == precision.gradient != "":
            steps.append((precision.operand, operands + gradients))
        elif precision.operand:
            steps += [(precision.operand, operands), (precision.gradient, gradients)]
        if precision.recipe is not None and precision.recipe not in BLACKWELLS:  # cuts of Hopper's, once a product
            cut, cuts = operand_roundings(precision.recipe, "forward", length).steps[-2]
            steps.append((cut, cuts * (operands + gradients)))
        independent = precision.smallest if precision.operand else None
        return Roundings(tuple(step for step in steps if step[1]), length, why=why, independent=independent)


# Kind of layer -> how often something is rounded on the way to each tensor ("": any other), and what that is.
LAYERS: Final[dict[str, tuple[dict[str, Count], str]]] = {
    "norm": ({"": Count(1)}, "statistics in fp32, the result rounded"),
    "norm_linear": (
        {
            "forward": Count(2, 2),  # normed; the result
            "": Count(2, 1, 1),  # of the input, the gradient of what was normed; of the weight, normed; the result
        },
        "the normed rows or their gradient, and the result",
    ),
    "gated_mlp": (
        {
            # Both halves of the up-projection carry normed and themselves; their product twice that, SiLU, itself; the
            # result.
            "forward": Count(7, 6),
            # The gradient of the product; times SiLU' and the other half, each with two; its own; normed's; the result.
            "": Count(8, 6, 2),
            "fc2_weight": Count(7, 5, 1),
        },
        "normed, up-projection, activation, down-projection; backward their gradients times what was kept",
    ),
    "plain_mlp": (
        {"forward": Count(5, 4), "": Count(6, 4, 2), "fc2_weight": Count(5, 3, 1)},
        "normed, up-projection, activation, down-projection; backward their gradients times what was kept",
    ),
    "head_loss": (
        {"forward": Count(1, 2), "": Count(4, 2, 1)},
        "the logits; backward their rounding as the exponential scales it, their gradient, the result",
    ),
    "mixer": (  # the in-projection by TE or not, the rest in torch with an fp32 scan
        {"forward": Count(12, 2), "": Count(20, 3, 2)},
        "x carries normed, projection, convolution and SiLU (4), dt and decay 2 each, b and c enter as sums in which "
        "theirs average out; then scan, skip, gate, norm and out-projection; each gradient that and its own way back",
    ),
    "recurrent": (  # projections in the layer's dtype, the recurrence in fp32
        {"forward": Count(5), "": Count(24)},
        "each row reads itself most: v carries normed and projection, the output gate 2, then y, norm and product, and "
        "q, k and the gates (8) for what it reads of others; the branch is half of the stream, so a quarter of that in "
        "the output, and the result; each gradient carries that and its own way back",
    ),
}


def layer_roundings(kind: str, name: str, precision: Precision, length: int) -> Roundings:
    """What is rounded on the way to a tensor of a layer.

    Args:
        kind: of the layer, as in `LAYERS`.
        name: "forward", or "grad." and the name of a leaf.
        precision: of what is stored and multiplied.
        length: products in the longest sum.
    """
    counts, why = LAYERS[kind]
    tensor = name.removeprefix("grad.")
    count = counts.get(tensor, counts[""])
    if kind == "norm" and precision.stored == "fp32":
        count = Count(4)  # four operations, each rounded to fp32
    found = count.roundings(precision, length, why)
    if tensor not in EXPANDED:
        return found
    # One number a head: the errors of eight numbers have a norm of up to twice its expectation (chi-square).
    return replace(found, amplification=2.0, why=f"{why}; the norm of so few errors scatters by 2")


WRITTEN: Final = Count(1.0)
# Normed, projected, turned, weights P, their product with V; operands of the projection.
ATTENDED: Final = Count(5.0, 2.0)
# That, the output projection and its operands.
ATTENTION: Final = ATTENDED + Count(1.0, 2.0)
# Counts of a gated and a plain MLP, its input exact.
MLP: Final = {True: LAYERS["gated_mlp"][0], False: LAYERS["plain_mlp"][0]}
# From the stream between to QKV's gradients: dO with its two operands; what attention kept; D or dP, dS, the result;
# turned back; normed, and the projection's gradient as an operand.
ATTENTION_BACK: Final = Count(11.0, 4.0, 2.0)
WHY: Final = (
    "attention: normed, projected, turned, weights, product, output; MLP: normed, up (both halves of a gate), "
    "activated, down; sums of the stream; backward their gradients times what was kept; parts by their share of a sum"
)


def block_roundings(
    tensor: str, shares: Shares, precision: Precision, length: int, *, gated: bool, independent: int
) -> Roundings:
    """The roundings on the way to one tensor.

    Args:
        tensor: "forward", "rows" (its gradient) or the name of a weight (its gradient).
        shares: of the parts, from the reference.
        precision: of what is stored and multiplied.
        length: products in the longest sum.
        gated: whether the MLP has a gate, whose halves both carry the errors of its input.
        independent: values of the smallest tensor on the way; a weight's gradient has more, but no more errors.
    """
    count = _block_count(tensor, shares, 2.0 if gated else 1.0, gated)
    return replace(count.roundings(precision, length, WHY), independent=independent)


def _block_count(tensor: str, shares: Shares, carried: float, gated: bool) -> Count:
    stream = shares.attention * ATTENTION + WRITTEN
    if tensor == "forward":
        return shares.stream * stream + shares.mlp * (carried * stream + MLP[gated]["forward"]) + WRITTEN
    if tensor == "mlp.fc2_weight":
        return carried * stream + MLP[gated]["fc2_weight"]
    through_mlp = (carried + 1.0) * stream + MLP[gated][""]
    if tensor in ("mlp.fc1_weight", "mlp.layer_norm_weight"):
        return through_mlp
    back = shares.mlp_back * through_mlp + WRITTEN
    if tensor == "out.weight":
        return back + ATTENDED + Count(1.0, 1.0, 1.0)
    through_attention = back + ATTENTION_BACK
    if tensor == "rows":
        return shares.stream_back * back + shares.attention_back * through_attention + WRITTEN
    return through_attention
