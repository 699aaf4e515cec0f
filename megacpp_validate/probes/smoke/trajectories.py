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

What the checks of the smoke run say of a run that has ended, each with the place that it names.

The judgement is theirs: what ranks raised, what they left in their receipts, and whether losses and gradient norms
follow those of one rank (`trajectories`). Here it is put into words that can be compared: step, ranks, module, tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...evidence.rounding import UNIT_ROUNDOFF, Depth
from ...training.smoke.run import SmokeResult

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


# As `training.parallel` words them.
_DIVERGED: Final = re.compile(
    r"^ReplicaDiverged: (\S+)(?: \S+)? is not the same on all ranks.*?Likely cause: an? (.+?) whose", re.S
)
_ACCUSED: Final = re.compile(r"all ranks(?:, the first of \d+)?: rank ([\d, ]+) has other bits")
_UNCOUNTED: Final = re.compile(r"expert (\d+): the router of rank (\d+) gave it")
_UNLIKE: Final = re.compile(r"(dispatch|combine|;)(?::)? rows of expert (\d+) from rank (\d+) to rank \d+")
_LAST: Final = re.compile(r"^rank (\d+) (?:was ended|ended by .*?); last collective: (\w+)", re.M)


@dataclass(frozen=True)
class Finding:
    """What one check said: `named` has step, ranks, module, tensor and the like."""

    check: str
    named: Mapping[str, Any]
    words: str


@dataclass(frozen=True)
class Seen:
    """What a run did in each step.

    Attributes:
        losses, norms: of the whole model.
        streams: layer -> norm of what it gave.
        parts: part of the model -> norm of its gradients.
        first: number of the first step.
    """

    losses: tuple[float | None, ...]
    norms: tuple[float | None, ...]
    streams: Mapping[str, Sequence[float]]
    parts: Mapping[str, Sequence[float]]
    first: int = 0

    @property
    def trajectory(self) -> Trajectory:
        """For `compare_trajectories`."""
        return Trajectory(self.losses, self.norms)

    def cut(self, first: int, steps: int) -> Seen:
        """So many steps of it from one on, which is counted from 0."""
        part = slice(first - self.first, first - self.first + steps)
        return Seen(
            self.losses[part],
            self.norms[part],
            {name: values[part] for name, values in self.streams.items()},
            {name: values[part] for name, values in self.parts.items()},
            first,
        )


@dataclass(frozen=True)
class Reference:
    """One rank, and what rounding alone does to it: its twins, the one in a single pass first."""

    run: Seen
    twins: tuple[Seen, ...]
    precision: str
    depth: Depth


@dataclass(frozen=True)
class _Far:
    step: int
    worth: float = field(compare=False)  # deviation over its bound


def read_seen(result: SmokeResult) -> Seen:
    """From the lowest rank's receipt; sums over ranks are the same on all of them."""
    receipt = result.first
    steps = receipt.get("steps", ())
    numbers = [[_finite(step[name]) for step in steps] for name in ("loss", "grad_norm")]
    return Seen(
        tuple(numbers[0]),
        tuple(numbers[1]),
        receipt.get("stream_norms") or {},
        receipt.get("part_norms") or {},
        int(steps[0]["step"]) if steps else 0,
    )


def find_raised(result: SmokeResult) -> list[Finding]:
    """What ended the run; the launcher names ranks where no check does."""
    if result.ending == "done":
        return []
    for receipt in result.receipts.values():
        fault, begun = receipt["fault"], receipt.get("resumed") or {"step": 0}
        step = int(begun["step"]) + len(receipt["steps"])
        if found := receipt.get("nonfinite"):
            named = {
                "step": found["step"],
                "ranks": [found["rank"]],
                "module": found["module"],
                "tensor": found["tensor"],
            }
            return [Finding("watch", named, found["words"])]
        if fault.startswith("TokensNotConserved"):
            return [Finding("conservation", {"step": step, **_name_tokens(fault)}, _shorten(fault))]
        if fault.startswith("ReplicaDiverged"):
            return [Finding("replicas", {"step": step, **_name_replica(fault)}, _shorten(fault))]
    last = dict(_LAST.findall(result.words))
    collectives = {last.get(str(rank), "") for rank in result.culprits}
    named = {"ending": result.ending, "ranks": list(result.culprits), "collective": ", ".join(sorted(collectives))}
    return [Finding("launcher", named, _shorten(result.words))]


def find_silent_experts(result: SmokeResult) -> list[Finding]:
    """Experts that no step gave a gradient, of a run that ended well."""
    lacking: list[str] = []
    for receipt in result.receipts.values():
        lacking += receipt.get("experts_without_gradient") or []
    if result.ending != "done" or not lacking:
        return []
    experts = sorted(set(lacking))
    return [Finding("gradients", {"experts": experts}, f"no step gave a gradient to {', '.join(experts)}")]


def find_departure(seen: Seen, reference: Reference) -> list[Finding]:
    """Where a run leaves that of one rank, over the steps that it did; nothing where it follows."""
    steps = len(seen.losses)
    if not steps:
        return []
    one, twins = reference.run.cut(0, steps), [twin.cut(0, steps) for twin in reference.twins]
    alike = Twins(twins[0].trajectory, tuple(twin.trajectory for twin in twins[1:]))
    verdicts = compare_trajectories(
        seen.trajectory, one.trajectory, alike, precision=reference.precision, depth=reference.depth
    )
    departs = [verdict for verdict in verdicts if not verdict.follows]
    if not departs:
        return []
    worst = departs[0]
    said = worst.fault or f"{worst.quantity} deviates by {worst.observed:.1e} of {worst.bound:.1e} at step {worst.step}"
    step, module = locate_departure(seen, reference)
    words = f"{said}; first at step {step}, in {module or 'no part alone'}"
    return [Finding("reproduce", {"step": step, "module": module}, words)]


def locate_departure(seen: Seen, reference: Reference) -> tuple[int, str]:
    """The first step in which anything is over its bound, and the module: -1 and none where nothing is.

    That is the first layer whose stream is, for what is wrong in a forward pass is wrong in all layers behind it; where
    no stream is, the part of the model whose gradients are furthest over.
    """
    steps = min(len(seen.losses), *(len(values) for values in seen.streams.values()))
    floor = reference.depth.floor(reference.precision)
    one, first, *others = (run.cut(0, steps) for run in (reference.run, *reference.twins))

    def far(series: str, name: str, rounding: float) -> _Far | None:
        values, *twins = (getattr(run, series)[name] for run in (first, *others))
        bounds = bounds_of(values, twins, rounding)
        return _first_far(getattr(seen, series)[name], getattr(one, series)[name], bounds)

    streams = {name: found for name in seen.streams if (found := far("streams", name, floor))}
    parts = {name: found for name in seen.parts if (found := far("parts", name, 2 * floor))}
    if not streams and not parts:
        return -1, ""
    step = min(found.step for found in (*streams.values(), *parts.values()))
    if now := [name for name, found in streams.items() if found.step == step]:
        return step, now[0]
    return step, max((name for name in parts if parts[name].step == step), key=lambda name: parts[name].worth)


def find_other_bits(check: str, seen: Seen, whole: Seen) -> list[Finding]:
    """Where a run that must have the bits of another one has not: losses, gradient norms, and what layers give."""
    wanted = whole.cut(seen.first, len(whole.losses) - (seen.first - whole.first))
    steps = [
        seen.first + at
        for name in ("losses", "norms")
        for at, (one, other) in enumerate(zip(getattr(seen, name), getattr(wanted, name), strict=False))
        if one != other
    ]
    if not steps and len(seen.losses) == len(wanted.losses) > 0:
        return []
    if not steps:
        words = f"{len(seen.losses)} steps from step {seen.first} on, and {len(wanted.losses)} were to come"
        return [Finding(check, {"step": seen.first}, words)]
    at = min(steps) - seen.first
    layers = [name for name, values in seen.streams.items() if values[at] != wanted.streams[name][at]]
    module = layers[0] if layers else ""
    words = f"not the bits of the run without a break, first at step {min(steps)}, in {module or 'no layer'}"
    return [Finding(check, {"step": min(steps), "module": module}, words)]


def _first_far(values: Iterable[float], wanted: Iterable[float], bounds: Iterable[float]) -> _Far | None:
    for step, (value, other, bound) in enumerate(zip(values, wanted, bounds, strict=False)):
        deviation = abs(value - other) / max(abs(other), math.ulp(1.0))
        if not deviation <= bound:  # a NaN is far, too
            return _Far(step, deviation / bound)
    return None


def _name_tokens(fault: str) -> dict[str, Any]:
    """Experts and the rank whose rows they are, as far as the message names them."""
    if counted := _UNCOUNTED.findall(fault):
        return {"experts": sorted({int(expert) for expert, _ in counted}), "source": int(counted[0][1])}
    if unlike := _UNLIKE.findall(fault):
        stage, _, source = unlike[0]
        return {"stage": stage, "experts": sorted({int(expert) for _, expert, _ in unlike}), "source": int(source)}
    return {}


def _name_replica(fault: str) -> dict[str, Any]:
    diverged, accused = _DIVERGED.search(fault), _ACCUSED.search(fault)
    named: dict[str, Any] = {"tensor": diverged[1], "kind": diverged[2]} if diverged else {}
    return {**named, "ranks": [int(rank) for rank in accused[1].split(",")]} if accused else named


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(float(value)) else None


def _shorten(words: str) -> str:
    """What happened, without cause and next step."""
    return words.partition(" Likely cause")[0].partition("\n")[0]
