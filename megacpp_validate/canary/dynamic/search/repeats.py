"""How often a point is run where a run may be wrong: a sequential probability ratio test (Wald, 1945).

A run gives the wrong verdict with probability `flaky`, independently of the others. After g good and b bad runs the
odds of one verdict against the other are ((1 - flaky) / flaky) ** (g - b), so only the lead of one counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_UNLIKELY = 1e-3  # so seldom may a minority be this large before the stated rate is doubted


@dataclass(frozen=True)
class Trust:
    """How far a single run is believed.

    Attributes:
        flaky: stated probability that one run is wrong, below 1/2; 0 makes every point one run.
        error: probability that the answer of the whole search may be wrong with.
    """

    flaky: float = 0.0
    error: float = 0.01

    def __post_init__(self) -> None:
        if not (0 <= self.flaky < 0.5 and 0 < self.error < 0.5):
            raise ValueError(
                f"flaky {self.flaky:g} and error {self.error:g} cannot be: a run that is wrong every other time says "
                "nothing. Next step: state a rate below 0.5, and an error above 0 and below 0.5."
            )

    def chance_wrong(self, lead: int) -> float:
        """Probability that the verdict with this lead is wrong, both being as likely beforehand."""
        return 0.0 if not self.flaky else 1 / (1 + ((1 - self.flaky) / self.flaky) ** lead)

    def needed_lead(self, points: float) -> int:
        """Lead from which on a point is decided, so that `points` of them are all right but for `error`."""
        if not self.flaky:
            return 1
        wrong = self.error / points
        return max(1, math.ceil(math.log((1 - wrong) / wrong) / math.log((1 - self.flaky) / self.flaky) - 1e-9))

    def most_runs(self, lead: int) -> int:
        """Runs after which a point is given up: ten times what it takes on average at the stated rate."""
        return 1 if not self.flaky else math.ceil(10 * lead / (1 - 2 * self.flaky))

    def is_unlikely(self, minority: int, runs: int) -> bool:
        """Whether so many runs against the verdict are more than the stated rate explains."""
        if not self.flaky:
            return minority > 0
        chances = (
            math.comb(runs, n) * self.flaky**n * (1 - self.flaky) ** (runs - n) for n in range(minority, runs + 1)
        )
        return sum(chances) < _UNLIKELY
