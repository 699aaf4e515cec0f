"""What the checks of the smoke run say of a run that has ended, each with the place that it names.

The judgement is theirs: what ranks raised, what they left in their receipts, and whether losses and gradient norms
follow those of one rank (`trajectories`). Here it is put into words that can be compared: step, ranks, module, tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...evidence.rounding import Depth
from ...training.smoke.run import SmokeResult
from .trajectories import Trajectory, Twins, bounds_of, compare_trajectories

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
