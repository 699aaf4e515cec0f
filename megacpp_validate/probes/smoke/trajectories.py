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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ...evidence.receipt import Check, Part
from ...evidence.rounding import UNIT_ROUNDOFF, Depth
from ...training.sizes import Size

MULTIPLE: Final = 8.0
TWINS: Final = (2, 4, 8)  # passes that the sequences of a step are split into
# Half of a norm's gradient is missing where one of two ranks is left out. Of the squares of the whole norm, a part
# among n of like size is 1/n: with the 20 to 60 parameters of these models the norm changes by 3 / (8 n) at least,
# 0.6%; and whatever a loss is wrong by at once, such as its share, is far more than that.
MOST: Final = 0.006
WHY_MOST: Final = (
    "at step 0: a norm's gradient that is missing on one of two ranks changes the norm of all by this share"
)
LOST: Final = 0.5  # of the update is lost where one of two ranks does not make its own
Series = Sequence[float | None]


@dataclass(frozen=True)
class Trajectory:
    """What a run did in each step; a number is None or NaN where it was not finite.

    Attributes:
        losses, grad_norms: of the whole model; losses in nats.
        streams: layer -> norm of what it gave.
        parts: part of the model -> norm of its gradients.
        first: number of the first step.
    """

    losses: Series
    grad_norms: Series
    streams: Mapping[str, Sequence[float]] = field(default_factory=dict)
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    first: int = 0

    @property
    def series(self) -> dict[str, Series]:
        """Quantity of the whole model -> its values."""
        return {"loss": self.losses, "grad_norm": self.grad_norms}

    def cut(self, first: int, steps: int) -> Trajectory:
        """So many steps of it from one on, which is counted from 0."""
        part = slice(first - self.first, first - self.first + steps)
        streams, parts = ({name: values[part] for name, values in of.items()} for of in (self.streams, self.parts))
        return Trajectory(self.losses[part], self.grad_norms[part], streams, parts, first)


def read_trajectory(receipt: Mapping[str, Any]) -> Trajectory:
    """From what a rank left; sums over ranks are the same on all of them. Without a step where it left nothing."""
    steps = receipt.get("steps", ())
    losses, norms = (tuple(read_number(step[name]) for step in steps) for name in ("loss", "grad_norm"))
    first = int(steps[0]["step"]) if steps else 0
    return Trajectory(losses, norms, receipt.get("stream_norms") or {}, receipt.get("part_norms") or {}, first)


def read_number(value: Any) -> float | None:
    """A number of a rank's receipt; None where it is not finite, which a receipt has as text."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


def depth_of(size: Size) -> Depth:
    """For bounds of the trajectories of a model."""
    widest = max(2 * size.hidden, size.ffn_hidden, size.expert_width, size.num_heads * size.head_dim)
    return Depth(len(size.letters) + 1, widest, size.batch * size.length)


@dataclass(frozen=True)
class Reference:
    """One rank, and what rounding alone does to it.

    Attributes:
        run: the same seed as the run that is judged.
        twins: runs of one rank whose sums alone differ: the one in a single pass first, then those in several.
        precision: a key of `UNIT_ROUNDOFF`.
        depth: of the model.
    """

    run: Trajectory
    twins: tuple[Trajectory, ...]
    precision: str
    depth: Depth

    def cut(self, steps: int) -> Reference:
        """Its first steps."""
        twins = tuple(twin.cut(0, steps) for twin in self.twins)
        return replace(self, run=self.run.cut(0, steps), twins=twins)


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

    def as_check(self, name: str) -> Check:
        """With its bounds, as NAME.QUANTITY."""
        name = f"{name}.{self.quantity}"
        if self.fault:
            return Check(name, False, detail=self.fault)
        parts = [
            Part("deviation", self.observed, self.bound, self.follows, self.derivation),
            Part("bound-discriminates", self.first, MOST, self.first <= MOST, WHY_MOST),
        ]
        if self.quantity == "loss":
            why = "least share of the change of the loss that a bound lets pass: one of two ranks that does not update"
            parts.append(Part("update-discriminates", self.lost, LOST, self.lost <= LOST, why))
        return Check(name, self.follows and self.discriminates, tuple(parts), f"worst at step {self.step}")


def compare_trajectories(plan: Trajectory, reference: Reference) -> tuple[Verdict, ...]:
    """Whether a run follows the reference as its twins do: a verdict each on losses and gradient norms.

    Raises:
        ValueError: no twin in several passes, or a precision that is not known.
    """
    precision, others = reference.precision, len(reference.twins) - 1
    if others < 1 or precision not in UNIT_ROUNDOFF:
        raise ValueError(
            f"{others} twins in {precision!r}. Next step: give one or more, in one of {', '.join(UNIT_ROUNDOFF)}."
        )
    base = reference.depth.floor(precision)
    return tuple(
        _compare(
            name,
            plan.series[name],
            reference.run.series[name],
            [twin.series[name] for twin in reference.twins],
            base * (2 if name == "grad_norm" else 1),
        )
        for name in reference.run.series
    )


def bounds_of(twins: Sequence[Series], floor: float) -> tuple[float, ...]:
    """Relative bound of each step, from how far twins are from the first of them."""
    bounds, most = [], 0.0
    first, *others = twins
    for step, value in enumerate(first):
        most = max([most, *(_deviation(twin[step], value) for twin in others)])
        bounds.append(MULTIPLE * most + floor * math.sqrt(step + 1))
    return tuple(bounds)


def _compare(name: str, plan: Series, reference: Series, twins: Sequence[Series], floor: float) -> Verdict:
    derivation = (
        f"{MULTIPLE:g} x the largest deviation of {len(twins) - 1} twins up to that step, and "
        f"{floor:.2g} x sqrt(step + 1) of rounding"
    )
    if fault := _find_fault(plan, reference, twins):
        return Verdict(name, 0, math.inf, 0.0, 0.0, 0.0, derivation, fault)
    bounds = bounds_of(twins, floor)
    seen = [_deviation(value, wanted) for value, wanted in zip(plan, reference, strict=True)]
    worst = max(range(len(seen)), key=lambda step: seen[step] / bounds[step])
    lost = _least_loss(reference, bounds) if name == "loss" else 0.0
    return Verdict(name, worst, seen[worst], bounds[worst], bounds[0], lost, derivation)


def _least_loss(reference: Series, bounds: Sequence[float]) -> float:
    """The least of the bounds as a share of what has changed since step 0; infinite where nothing has."""
    changed = [_deviation(value, reference[0]) for value in reference]
    return min((bound / by for bound, by in zip(bounds, changed, strict=True) if by > 0), default=math.inf)


def _find_fault(plan: Series, reference: Series, twins: Sequence[Series]) -> str:
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


def locate_departure(seen: Trajectory, reference: Reference) -> tuple[int, str]:
    """The first step in which anything is over its bound, and the module: -1 and none where nothing is.

    That is the first layer whose stream is, for what is wrong in a forward pass is wrong in all layers behind it; where
    no stream is, the part of the model whose gradients are furthest over.
    """
    known = reference.cut(min([len(seen.losses), *map(len, seen.streams.values())]))
    floor = reference.depth.floor(reference.precision)
    off: dict[tuple[int, str], dict[str, float]] = {}  # step and series -> name -> deviation over its bound
    for series, rounding in (("streams", floor), ("parts", 2 * floor)):
        for name, values in getattr(seen, series).items():
            bounds = bounds_of([getattr(twin, series)[name] for twin in known.twins], rounding)
            if found := _first_far(values, getattr(known.run, series)[name], bounds):
                off.setdefault((found[0], series), {})[name] = found[1]
    if not off:
        return -1, ""
    step = min(at for at, _ in off)
    if streams := off.get((step, "streams")):
        return step, next(iter(streams))
    parts = off[step, "parts"]
    return step, max(parts, key=parts.__getitem__)


def _first_far(values: Iterable[float], wanted: Iterable[float], bounds: Iterable[float]) -> tuple[int, float] | None:
    """The first step over its bound, and by how much."""
    for step, (value, other, bound) in enumerate(zip(values, wanted, bounds, strict=False)):
        if not (deviation := _deviation(value, other)) <= bound:  # a NaN is far, too
            return step, deviation / bound
    return None
