"""What the loss gate decided about one FP8 recipe, and the series that it looked at."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from ..errors import Exit, exit_for
from ..evidence.receipt import Check
from ..evidence.values import Frozen


class LossOutcome(StrEnum):
    """How the gate decided. Only `PASS` is good."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"  # a check out of its bound
    REFUSED = "refused"  # the curves cannot be compared: nothing is known of the recipe


class SeedSeries(Frozen):
    """The smoothed curves of one seed, a value a step: each is the mean over the `window` steps that end there.

    Attributes:
        steps: number of the last step of each window.
        reference: smoothed loss of BF16, in nats.
        gap: smoothed loss of the candidate minus that of BF16, in nats.
    """

    seed: int
    steps: tuple[int, ...]
    reference: tuple[float, ...]
    gap: tuple[float, ...]


class LossVerdict(Frozen):
    """The gate's answer on one recipe.

    Attributes:
        of: the cell whose curves were judged; empty where they came from none.
        recipe: of the candidate; empty where the curves do not agree on one.
        outcome: what holds.
        refusals: why the curves cannot be compared; empty otherwise.
        checks: each with its observed value, its bound and where that comes from; empty if refused.
        window: number of steps of the smoothing.
        bar: what the smoothed gap of each seed may be at most in the second half, in nats.
        early_bar: the same in the first half.
        spread: the seed-to-seed spread of BF16 that the bar comes from, in nats; None where it overflows.
        series: smoothed curves of each seed; empty where a curve is damaged, or its sums overflow.
    """

    schema_id: Literal["megacpp-validate/loss-verdict/1"] = "megacpp-validate/loss-verdict/1"
    of: str = ""
    recipe: str
    outcome: LossOutcome
    refusals: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    window: int | None = None
    bar: float | None = None
    early_bar: float | None = None
    spread: float | None = None
    series: tuple[SeedSeries, ...] = ()


class LossGateResult(Frozen):
    """What the gate decided about every recipe of a folder.

    Attributes:
        tool: that decided.
        folder: whose curves were read.
        verdicts: of each cell and recipe.
    """

    schema_id: Literal["megacpp-validate/loss-gate/1"] = "megacpp-validate/loss-gate/1"
    tool: str
    folder: str
    verdicts: tuple[LossVerdict, ...]

    @property
    def holds(self) -> bool:
        """Whether there is a verdict, and every one is a pass."""
        return bool(self.verdicts) and all(verdict.outcome is LossOutcome.PASS for verdict in self.verdicts)

    @property
    def breaks(self) -> bool:
        """Whether a recipe failed; curves that cannot be compared are lost evidence."""
        return any(verdict.outcome is LossOutcome.FAIL for verdict in self.verdicts)

    @property
    def exit(self) -> Exit:
        """Closed where a recipe fails; evidence is missing where curves cannot be compared, or there are none."""
        return exit_for(breaks=self.breaks, lacks=not self.holds)
