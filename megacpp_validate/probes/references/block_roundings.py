"""What is rounded on the way to each tensor of the A-block, counted part by part.

Relative errors of independent roundings add as squares, through linear maps unchanged; where two factors meet, their
counts add. On a residual stream the errors of a part count by its share in the squared norm of the sum, which the
reference knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ..bounds import Roundings
from .block import Shares
from .layer_roundings import Count, Precision


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
        tensor: "out", "rows" (its gradient) or the name of a weight (its gradient).
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
    if tensor == "out":
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
