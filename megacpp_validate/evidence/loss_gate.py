"""What the loss gate decided about one FP8 recipe, and the series that it looked at."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from .findings import Frozen
from .receipt import Check


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
        recipe: of the candidate; empty where the curves do not agree on one.
        outcome: what holds.
        refusals: why the curves cannot be compared; empty otherwise.
        checks: each with its observed value, its bound and where that comes from; empty if refused.
        window: number of steps of the smoothing.
        bar: what the smoothed gap of each seed may be at most, in nats.
        spread: the seed-to-seed spread of BF16 that the bar comes from, in nats; None where it overflows.
        series: smoothed curves of each seed; empty where a curve is damaged, or its sums overflow.
    """

    schema_id: Literal["megacpp-validate/loss-verdict/1"] = "megacpp-validate/loss-verdict/1"
    recipe: str
    outcome: LossOutcome
    refusals: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    window: int | None = None
    bar: float | None = None
    spread: float | None = None
    series: tuple[SeedSeries, ...] = ()
