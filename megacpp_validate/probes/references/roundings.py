"""What is rounded on the way to each tensor of the layers of the spec, counted layer by layer.

Relative errors of independent roundings add as squares, through linear maps unchanged. Where two factors meet, their
counts add. Through SiLU and GELU of values of size 1 a count grows by less than a tenth (E[silu'^2] / E[silu^2] =
1.07); their derivatives pass on less than it was.

What is rounded on the way to each tensor of the A-block, counted part by part.

Relative errors of independent roundings add as squares, through linear maps unchanged; where two factors meet, their
counts add. On a residual stream the errors of a part count by its share in the squared norm of the sum, which the
reference knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ..bounds import Roundings
from ..emulation import FORMATS, Recipe, operand_roundings
from .attention import Shares
from .layers import EXPANDED


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
    """How often something is rounded before one tensor is there, itself included.

    Attributes:
        stored: tensors that were written.
        operands: activations and weights that went into products.
        gradients: gradients that went into products.
    """

    stored: int
    operands: int = 0
    gradients: int = 0

    def roundings(self, precision: Precision, length: int, why: str) -> Roundings:
        """As a bound takes it, with sums of `length` products."""
        steps = [(precision.stored, self.stored)]
        if precision.operand == precision.gradient != "":
            steps.append((precision.operand, self.operands + self.gradients))
        elif precision.operand:
            steps += [(precision.operand, self.operands), (precision.gradient, self.gradients)]
        if precision.recipe is not None:  # the cuts of the FP8 accumulator, once a product
            cut = operand_roundings(precision.recipe, "forward", length).steps[-2]
            steps.append((cut[0], cut[1] * (self.operands + self.gradients)))
        independent = precision.smallest if precision.operand else None
        return Roundings(tuple(step for step in steps if step[1]), length, why=why, independent=independent)


_NORM: Final = {"forward": Count(1), "input": Count(1), "weight": Count(1)}
_NORM_LINEAR: Final = {
    "forward": Count(2, 2),  # normed; the result
    "input": Count(2, 1, 1),  # the gradient of what was normed; the result
    "layer_norm_weight": Count(2, 1, 1),
    "weight": Count(2, 1, 1),  # normed; the result
}
_GATED_MLP: Final = {
    # Both halves of the up-projection carry normed and themselves; their product twice that, SiLU, itself; the result.
    "forward": Count(7, 6),
    # The gradient of the product; times SiLU' and the other half, each with two; its own; normed's; the result.
    "input": Count(8, 6, 2),
    "layer_norm_weight": Count(8, 6, 2),
    "fc1_weight": Count(8, 6, 2),
    "fc2_weight": Count(7, 5, 1),
}
_PLAIN_MLP: Final = {
    "forward": Count(5, 4),
    "input": Count(6, 4, 2),
    "layer_norm_weight": Count(6, 4, 2),
    "fc1_weight": Count(6, 4, 2),
    "fc2_weight": Count(5, 3, 1),
}


def norm_roundings(name: str, precision: Precision, length: int) -> Roundings:
    """RMSNorm alone: statistics and products in fp32, rounded once; in fp32 itself four operations each."""
    count = _NORM[name.removeprefix("grad.")] if precision.stored != "fp32" else Count(4)
    return count.roundings(precision, length, "statistics in fp32, the result rounded")


def norm_linear_roundings(name: str, precision: Precision, length: int) -> Roundings:
    """Norm, then a linear layer."""
    return _NORM_LINEAR[name.removeprefix("grad.")].roundings(
        precision, length, "the normed rows or their gradient, and the result"
    )


def mlp_roundings(name: str, precision: Precision, length: int, *, gated: bool) -> Roundings:
    """Norm, up-projection, activation, down-projection."""
    table: Mapping[str, Count] = _GATED_MLP if gated else _PLAIN_MLP
    why = "normed, up-projection, activation, down-projection; backward their gradients times what was kept"
    return table[name.removeprefix("grad.")].roundings(precision, length, why)


def mixer_roundings(name: str, precision: Precision, length: int) -> Roundings:
    """The Mamba-2 mixer: its in-projection by TE or not, the rest in torch with an fp32 scan."""
    count = Count(12, 2) if name == "forward" else Count(20, 3, 2)
    why = (
        "x carries normed, projection, convolution and SiLU (4), dt and decay 2 each, b and c enter as sums in which "
        "theirs average out; then scan, skip, gate, norm and out-projection; each gradient that and its own way back"
    )
    return _widened(name, count.roundings(precision, length, why))


def recurrent_roundings(name: str, precision: Precision, length: int) -> Roundings:
    """The matrix-state recurrent block: projections in its dtype, the recurrence in fp32."""
    count = Count(5) if name == "forward" else Count(24)
    why = (
        "each row reads itself most: v carries normed and projection, the output gate 2, then y, norm and product, and "
        "q, k and the gates (8) for what it reads of others; the branch is half of the stream, so a quarter of that in "
        "the output, and the result; each gradient carries that and its own way back"
    )
    return _widened(name, count.roundings(precision, length, why))


def _widened(name: str, roundings: Roundings) -> Roundings:
    """For one number a head: the errors of eight numbers have a norm of up to twice its expectation (chi-square)."""
    if name.removeprefix("grad.") not in EXPANDED:
        return roundings
    why = f"{roundings.why}; the norm of so few errors scatters by 2"
    return replace(roundings, amplification=2.0, why=why)


@dataclass(frozen=True)
class _Errors:
    """Squared relative errors in units of one rounding: of what is written; of operands, of gradients in products."""

    stored: float = 0.0
    operands: float = 0.0
    gradients: float = 0.0

    def __add__(self, other: _Errors) -> _Errors:
        return _Errors(self.stored + other.stored, self.operands + other.operands, self.gradients + other.gradients)

    def __rmul__(self, factor: float) -> _Errors:
        return _Errors(factor * self.stored, factor * self.operands, factor * self.gradients)


WRITTEN: Final = _Errors(1.0)
# Normed, projected, turned, weights P, their product with V; operands of the projection.
ATTENDED: Final = _Errors(5.0, 2.0)
# That, the output projection and its operands.
ATTENTION: Final = ATTENDED + _Errors(1.0, 2.0)
# Output of a gated and a plain MLP, of its input exact: see `layer_roundings`.
MLP: Final = {True: _Errors(7.0, 6.0), False: _Errors(5.0, 4.0)}
# Its gradients of input, norm and up-projection.
MLP_BACK: Final = {True: _Errors(8.0, 6.0, 2.0), False: _Errors(6.0, 4.0, 2.0)}
# From the stream between to QKV's gradients: dO with its two operands; what attention kept; D or dP, dS, the result;
# turned back; normed, and the projection's gradient as an operand.
ATTENTION_BACK: Final = _Errors(11.0, 4.0, 2.0)
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
    errors = _errors(tensor, shares, 2.0 if gated else 1.0, gated)
    count = Count(math.ceil(errors.stored), math.ceil(errors.operands), math.ceil(errors.gradients))
    return replace(count.roundings(precision, length, WHY), independent=independent)


def _errors(tensor: str, shares: Shares, carried: float, gated: bool) -> _Errors:
    stream = shares.attention * ATTENTION + WRITTEN
    if tensor == "forward":
        return shares.stream * stream + shares.mlp * (carried * stream + MLP[gated]) + WRITTEN
    if tensor == "mlp.fc2_weight":
        return carried * stream + MLP[gated] + _Errors(0.0, -1.0, 1.0)  # for fc2 itself, the gradient
    through_mlp = (carried + 1.0) * stream + MLP_BACK[gated]
    if tensor in ("mlp.fc1_weight", "mlp.layer_norm_weight"):
        return through_mlp
    back = shares.mlp_back * through_mlp + WRITTEN
    if tensor == "out.weight":
        return back + ATTENDED + _Errors(1.0, 1.0, 1.0)
    through_attention = back + ATTENTION_BACK
    if tensor == "rows":
        return shares.stream_back * back + shares.attention_back * through_attention + WRITTEN
    return through_attention
