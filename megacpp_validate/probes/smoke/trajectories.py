"""Whether one training run reproduces another step by step: bounds from what rounding alone does to it. Pure.

Two runs that compute the same sums in another order differ by roundings, and training grows the difference: an error of
one step is in the weights of the next. How fast it grows nobody knows beforehand (a router that flips a token makes it
jump), so it is measured: twins are runs of one rank that differ from a run in one pass in nothing but the order of
their sums (the sequences of a step in 2, 4 or 8 passes). The loss that balances experts is no sum over passes, so it
is off in all of those; in the run that is judged, and in its reference, it is on. The bound of a step is

    MULTIPLE * (largest deviation of any twin up to that step) + floor of that step

- The floor is for twins that were lucky: what independent roundings do at one step (`evidence.rounding`); a gradient is
  twice as long a way, and step t has had t + 1 such errors.
- MULTIPLE is for plans that are less lucky than every twin. Along the direction that grows fastest, plan and twin are
  draws of one normal distribution; |plan| exceeds MULTIPLE * |twin| with probability (2 / pi) atan(1 / MULTIPLE), and
  that of all three twins at once with about its cube: 8 gives 5e-4, where the floor is none.

A fault of the plan is no rounding, and a bound that would let one pass fails the check by that name. There are two:

- A gradient that is not summed over a group is wrong by a share of itself, from step 0 on, where twins have the same
  weights still: the bound of step 0 is at most `MOST`. Later ones are wide: Adam moves a weight whose gradient is all
  rounding as far as any other (bf16 on an H200: norms of twins are 3e-4 apart at step 0, and 2e-3 one update later).
- An update that some ranks do not make shows in the loss of later steps, by a share of what the loss has changed: at
  one of the steps the bound is at most `LOST` of that change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...evidence.rounding import UNIT_ROUNDOFF, Depth

MULTIPLE: Final = 8.0
# Half of a norm's gradient is missing where one of two ranks is left out. Of the squares of the whole norm, a part
# among n of like size is 1/n: with the 20 to 60 parameters of these models the norm changes by 3 / (8 n) at least,
# 0.6%; and whatever a loss is wrong by at once, such as its share, is far more than that.
MOST: Final = 0.006
LOST: Final = 0.5  # of the update is lost where one of two ranks does not make its own


@dataclass(frozen=True)
class Trajectory:
    """Losses (nats) and gradient norms of the steps of one run; None or NaN where a number was not finite."""

    losses: tuple[float | None, ...]
    grad_norms: tuple[float | None, ...]

    @property
    def series(self) -> dict[str, tuple[float | None, ...]]:
        """Quantity -> its values."""
        return {"loss": self.losses, "grad_norm": self.grad_norms}


@dataclass(frozen=True)
class Verdict:
    """How one quantity followed.

    Attributes:
        quantity: "loss" or "grad_norm".
        step: at which it came closest to its bound, or went furthest over it.
        observed, bound: relative deviation there, and what was allowed; infinite where a number is missing.
        first: bound of step 0; over `MOST` it tells nothing of gradients.
        lost: the least share of a change since step 0 that a bound lets pass, of losses; 0 of gradient norms.
        derivation: of the bound.
        fault: what is missing or not finite; empty where nothing is.
    """

    quantity: str
    step: int
    observed: float
    bound: float
    first: float
    lost: float
    derivation: str
    fault: str = ""

    @property
    def follows(self) -> bool:
        """Whether it stayed within its bound at every step."""
        return not self.fault and self.observed <= self.bound

    @property
    def discriminates(self) -> bool:
        """Whether the bounds would have caught a gradient that is not summed and half an update that is not made."""
        return self.first <= MOST and self.lost <= LOST


@dataclass(frozen=True)
class Twins:
    """Runs of one rank whose sums alone differ: in one pass, and in several."""

    first: Trajectory
    others: tuple[Trajectory, ...]


def compare_trajectories(
    plan: Trajectory, reference: Trajectory, twins: Twins, *, precision: str, depth: Depth
) -> tuple[Verdict, ...]:
    """Whether a run follows the reference as its twins do: a verdict each on losses and gradient norms.

    Args:
        plan: the run that is judged.
        reference: one rank, the same seed.
        twins: what rounding alone does.
        precision: a key of `UNIT_ROUNDOFF`.
        depth: of the model.

    Raises:
        ValueError: no twin, or a precision that is not known.
    """
    if not twins.others or precision not in UNIT_ROUNDOFF:
        raise ValueError(
            f"{len(twins.others)} twins in {precision!r}. Next step: give one or more, in one of "
            f"{', '.join(UNIT_ROUNDOFF)}."
        )
    base = depth.floor(precision)
    return tuple(
        _compare(
            name,
            plan.series[name],
            reference.series[name],
            twins.first.series[name],
            [twin.series[name] for twin in twins.others],
            base * (2 if name == "grad_norm" else 1),
        )
        for name in reference.series
    )


def bounds_of(
    first: Sequence[float | None], twins: Sequence[Sequence[float | None]], floor: float
) -> tuple[float, ...]:
    """Relative bound of each step."""
    bounds, most = [], 0.0
    for step, value in enumerate(first):
        most = max([most, *(_deviation(twin[step], value) for twin in twins)])
        bounds.append(MULTIPLE * most + floor * math.sqrt(step + 1))
    return tuple(bounds)


def _compare(
    name: str,
    plan: Sequence[float | None],
    reference: Sequence[float | None],
    first: Sequence[float | None],
    twins: Sequence[Sequence[float | None]],
    floor: float,
) -> Verdict:
    derivation = (
        f"{MULTIPLE:g} x the largest deviation of {len(twins)} twins up to that step, and "
        f"{floor:.2g} x sqrt(step + 1) of rounding"
    )
    if fault := _find_fault(plan, reference, (first, *twins)):
        return Verdict(name, 0, math.inf, 0.0, 0.0, 0.0, derivation, fault)
    bounds = bounds_of(first, twins, floor)
    seen = [_deviation(value, wanted) for value, wanted in zip(plan, reference, strict=True)]
    worst = max(range(len(seen)), key=lambda step: seen[step] / bounds[step])
    lost = _least_loss(reference, bounds) if name == "loss" else 0.0
    return Verdict(name, worst, seen[worst], bounds[worst], bounds[0], lost, derivation)


def _least_loss(reference: Sequence[float | None], bounds: Sequence[float]) -> float:
    """The least of the bounds as a share of what has changed since step 0; infinite where nothing has."""
    changed = [_deviation(value, reference[0]) for value in reference]
    return min((bound / by for bound, by in zip(bounds, changed, strict=True) if by > 0), default=math.inf)


def _find_fault(
    plan: Sequence[float | None], reference: Sequence[float | None], twins: Sequence[Sequence[float | None]]
) -> str:
    """What cannot be compared; a run that is short, or not finite, never reproduces another."""
    named = {"the plan": plan, "the reference": reference}
    named |= {f"twin {number}": twin for number, twin in enumerate(twins)}
    if not reference:
        return "there is no step"
    for who, values in named.items():
        if len(values) != len(reference):
            return f"{who} has {len(values)} of {len(reference)} steps"
        for step, value in enumerate(values):
            if value is None or not math.isfinite(value):
                return f"{who} is not finite at step {step}"
    return ""


def _deviation(value: float | None, wanted: float | None) -> float:
    if value is None or wanted is None:
        return math.inf
    return abs(value - wanted) / max(abs(wanted), math.ulp(1.0))
