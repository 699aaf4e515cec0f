"""The state of delayed scaling, step by step, as its recipe says: amax history and scale of one tensor.

Source: Transformer Engine 2.12 to 2.20, `pytorch/quantization.py` (`_amax_and_scale_update`,
`_default_sf_compute`), and Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class DelayedReference:
    """One tensor's state.

    Attributes:
        largest: largest value of its format.
        length: steps that are remembered.
        scale: what the next step multiplies by before the cast; 1 until something was seen.
        history: amax of the remembered steps, the newest last; entry 0 is where the running step collects.
    """

    largest: float
    length: int = 16
    scale: float = 1.0
    history: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"an amax history of {self.length} steps remembers nothing. Next step: 1 or more.")
        self.history = self.history or [0.0] * self.length

    def end_step(self, amax: float) -> None:
        """Take in the amax of a step that has ended: the history moves on by one, the scale follows its maximum.

        The entry that drops out of the history no longer counts. A maximum of zero, or one that is not finite, leaves
        the scale as it was.
        """
        seen = [amax, *self.history[1:]]
        top = max(seen)
        if top > 0 and math.isfinite(top):
            self.scale = min(self.largest / top, 3.4028234663852886e38)
        self.history = [0.0, *seen[2:], amax] if self.length > 1 else [0.0]
