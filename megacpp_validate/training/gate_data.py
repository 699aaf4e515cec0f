"""What the loss gate trains on: the language of `language.py`, half of it quiet, with gauges in it.

Each property of an FP8 format is made to matter to the loss (the arithmetic is in `gate_model.py`):

- range: the second half of a batch is *quiet*. It is the same language in letters of its own, and its loss is weighted
  by 2^-20. Adam does not care; a format whose range ends above that flushes the only gradients that those letters have.
- resolution: at fixed places a *gauge* shows one of seven levels of one binade, and the model is to name the level.
  E4M3 holds all of them exactly, whatever power of two scales them; E5M2 holds every other one.
- memory: the loss of one early step is a *spike*. What remembers that amax for longer than its 16 steps flushes what
  is quiet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from .language import Language
from .seeds import generator_of
from .sizes import Size

QUIET: Final = 2.0**-20
SPIKE_STEP: Final = 4  # within warm-up: the 16 steps that the history remembers it for are worth two steps of learning
SPIKE: Final = 2.0**18
FIRST_LEVEL, LAST_LEVEL = 8, 14  # sixteenths: 8/16 .. 14/16, all of 3 mantissa bits
LEVEL_UNIT: Final = 16
GAUGE_EVERY: Final = 16
GAUGE_FIRST: Final = 5


@dataclass(frozen=True, eq=False)
class Lesson:
    """What one step reads; the first half of the sequences is loud, the second quiet.

    Attributes:
        tokens: [B, T] int64, letters from 0 to V - 1 whether loud or quiet.
        levels: [B, G] int64 from 8 to 14, of the gauges at `places`.
        places: [G] int64, positions of the gauges in a sequence.
        targets: [B, T] int64: the next letter, or the level less 8 where there is a gauge.
    """

    tokens: Any
    levels: Any
    places: Any
    targets: Any


class GateData:
    """The lessons of a size, a step at a time; they depend on nothing but the size and the seed.

    Args:
        size: its language, batch and length.
        seed: of the language and of what is said in it; not that of the weights.
    """

    def __init__(self, size: Size, *, seed: int = 0) -> None:
        self.size, self.seed = size, seed
        self.language = Language(size.grammar, seed=seed)
        self.places = torch.arange(GAUGE_FIRST, size.length, GAUGE_EVERY)

    def lesson(self, step: int) -> Lesson:
        """What is read at a step, on the CPU."""
        size = self.size
        read = self.language.batch(step, size.batch, size.length + 1)
        drawn = generator_of(self.seed, "gauges", step)
        levels = torch.randint(FIRST_LEVEL, LAST_LEVEL + 1, (size.batch, len(self.places)), generator=drawn)
        targets = read[:, 1:].clone()
        targets[:, self.places] = levels - FIRST_LEVEL
        return Lesson(read[:, :-1].contiguous(), levels, self.places, targets)


def spike_of(step: int) -> float:
    """What the loss of a step is multiplied by before backward."""
    return SPIKE if step == SPIKE_STEP else 1.0
