"""What rounding alone does to the loss of a training step.

Roundings are independent, so errors grow as random walks do (Higham and Mary 2019, "A new approach to probabilistic
rounding error analysis", theorem 2.4: the square root of the worst case). The mean over N tokens is a sum of N terms:
sqrt(N) * u of what it is summed in. What a token brings passed L layers of K roundings each, in the precision of the
layers, and is one of N that are wrong independently: sqrt(L * K / N) * u. In bf16, products are summed in fp32 and
rounded where they are stored (K = STORED); else every term of the longest sum is rounded. SIGMAS of that are a walk's
bound; step t has had t + 1 such errors, and a walk of them is sqrt(t + 1) as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# 2**-p of p significand bits, the hidden one among them: IEEE 754 binary64 and binary32, bfloat16.
UNIT_ROUNDOFF: Final = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8}
SUMMED_IN: Final = {"fp64": "fp64", "fp32": "fp32", "bf16": "fp32"}
STORED: Final = 10  # activations of a layer that are stored: two norms, four or five products, gate, two sums
SIGMAS: Final = 2.0


@dataclass(frozen=True)
class Depth:
    """What an error goes through: layers L, terms K of the longest sum of a layer; and tokens N of a step."""

    layers: int
    terms: int
    tokens: int

    def floor(self, precision: str) -> float:
        """Relative error of a mean over the tokens that rounding alone makes, at one step.

        Args:
            precision: of the layers, a key of `UNIT_ROUNDOFF`.
        """
        rounded = self.terms if SUMMED_IN[precision] == precision else STORED
        summed = UNIT_ROUNDOFF[SUMMED_IN[precision]] * math.sqrt(self.tokens)
        return SIGMAS * (summed + UNIT_ROUNDOFF[precision] * math.sqrt(self.layers * rounded / self.tokens))
