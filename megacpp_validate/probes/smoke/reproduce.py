"""A plan against one rank, the same seed, step by step: bounds from what rounding alone does to a run.

Two runs that compute the same sums in another order differ by roundings, and training grows the difference: an error of
one step is in the weights of the next. How fast it grows nobody knows beforehand (a router that flips a token makes it
jump), so it is measured: twins are runs of one rank that differ from a run in one pass in nothing but the order of
their sums (the sequences of a step in 2, 4 or 8 passes). The loss that balances experts is not summed over passes, so
it is off in all of those; in the run that is judged, and in its reference, it is on. The bound of a step is

    MULTIPLE * (largest deviation of any twin up to that step) + floor of that step

- The floor is for twins that were lucky: what independent roundings do at one step (`evidence.loss_curve`); a gradient
  is twice as long a way, and step t has had t + 1 such errors.
- MULTIPLE is for plans that are less lucky than every twin. Along the direction that grows fastest, plan and twin are
  draws of one normal distribution; |plan| exceeds MULTIPLE * |twin| with probability (2 / pi) atan(1 / MULTIPLE), and
  that of all three twins at once with about its cube: 8 gives 5e-4, where there is no floor.

A fault of the plan is not rounding, and a bound that would let one pass fails the check by that name. There are two:

- A gradient that is not summed over a group is wrong by a share of itself, from step 0 on, where twins have the same
  weights still: the bound of step 0 is at most `MOST`. Later ones are wide: Adam moves a weight whose gradient is all
  rounding as far as any other (bf16 on an H200: norms of twins are 3e-4 apart at step 0, and 2e-3 one update later).
- An update that some ranks do not make shows in the loss of later steps, by a share of what the loss has changed: at
  one of the steps the bound is at most `LOST` of that change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...evidence.loss_curve import Depth
from ...evidence.receipt import Check
from ...training.sizes import Size
from ...training.smoke.order import SmokeOrder
from ..bench import Bench
from ..bounds import check_of, part
from .runs import Run, Runs, Series, Trajectory, check_parts, have_ended, open_runs

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


def compare_trajectories(plan: Trajectory, reference: Reference) -> dict[str, Check]:
    """Whether a run follows the reference as its twins do: quantity -> its check, named after it.

    The first part of a check is whether the run stays within its bound at every step. The others fail where a bound
    would let pass a gradient that is not summed, or half an update that is not made.
    """
    base = reference.depth.floor(reference.precision)
    found = {}
    for name, wanted in reference.run.series.items():
        twins, floor = [twin.series[name] for twin in reference.twins], base * (2 if name == "grad_norm" else 1)
        found[name] = _compare(name, plan.series[name], wanted, twins, floor)
    return found


def follows(check: Check) -> bool:
    """Whether a run stays within the bound of a check of `compare_trajectories`, whatever the bound is worth."""
    return bool(check.parts) and check.parts[0].passed


def bounds_of(twins: Sequence[Series], floor: float) -> tuple[float, ...]:
    """Relative bound of each step, from how far twins are from the first of them."""
    bounds, most = [], 0.0
    first, *others = twins
    for step, value in enumerate(first):
        most = max([most, *(_deviation(twin[step], value) for twin in others)])
        bounds.append(MULTIPLE * most + floor * math.sqrt(step + 1))
    return tuple(bounds)


def _compare(name: str, plan: Series, reference: Series, twins: Sequence[Series], floor: float) -> Check:
    if fault := _find_fault({"the plan": plan, "the reference": reference}, twins):
        return Check(name, False, detail=fault)
    bounds = bounds_of(twins, floor)
    seen = [_deviation(value, wanted) for value, wanted in zip(plan, reference, strict=True)]
    worst = max(range(len(seen)), key=lambda step: seen[step] / bounds[step])
    derivation = (
        f"{MULTIPLE:g} x the largest deviation of {len(twins) - 1} twins up to that step, and "
        f"{floor:.2g} x sqrt(step + 1) of rounding"
    )
    parts = [
        part("deviation", seen[worst], bounds[worst], derivation),
        part("bound-discriminates", bounds[0], MOST, WHY_MOST),
    ]
    if name == "loss":
        changed = [_deviation(value, reference[0]) for value in reference]
        lost = min((bound / by for bound, by in zip(bounds, changed, strict=True) if by > 0), default=math.inf)
        why = "least share of the change of the loss that a bound lets pass: one of two ranks that does not update"
        parts.append(part("update-discriminates", lost, LOST, why))
    return check_of(name, *parts, detail=f"worst at step {worst}")


def _find_fault(named: dict[str, Series], twins: Sequence[Series]) -> str:
    """What cannot be compared; a run that is short, or not finite, never reproduces another."""
    steps = len(named["the reference"])
    if not steps or len(twins) < 2:
        return f"there are {steps} steps and {len(twins) - 1} twins"
    for who, values in (named | {f"twin {number}": twin for number, twin in enumerate(twins)}).items():
        if len(values) != steps:
            return f"{who} has {len(values)} of {steps} steps"
        bad = [step for step, value in enumerate(values) if value is None or not math.isfinite(value)]
        if bad:
            return f"{who} is not finite at step {bad[0]}"
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
    off: list[tuple[int, bool, float, str]] = []  # step, whether it is a part, less its deviation over the bound, name
    for place, (series, rounding) in enumerate((("streams", floor), ("parts", 2 * floor))):
        for number, (name, values) in enumerate(getattr(seen, series).items()):
            bounds = bounds_of([getattr(twin, series)[name] for twin in known.twins], rounding)
            found = _first_far(values, getattr(known.run, series)[name], bounds)
            if found is not None:
                off.append((found[0], bool(place), -found[1] if place else number, name))
    step, _, _, module = min(off, default=(-1, False, 0.0, ""))
    return step, module


def _first_far(values: Iterable[float], wanted: Iterable[float], bounds: Iterable[float]) -> tuple[int, float] | None:
    """The first step over its bound, and by how much."""
    for step, (value, other, bound) in enumerate(zip(values, wanted, bounds, strict=False)):
        if not (deviation := _deviation(value, other)) <= bound:  # a NaN is far, too
            return step, deviation / bound
    return None


# --- probe


def probe(bench: Bench) -> None:
    """Run the plan, the reference and its twins, and compare."""
    with open_runs(bench) as runs:
        plan = runs.run("plan")
        alone = run_reference(runs)
        if have_ended(bench, plan, *alone):
            check_parts(bench, plan, alone[0])
            reference = reference_of([run.trajectory for run in alone], plan.order)
            check_follows(bench, "reproduces", plan.trajectory, reference)


def run_reference(runs: Runs) -> list[Run]:
    """One rank and its twins, as `twins_of` orders them."""
    given = runs.bench.setting("twins")
    splits = [split for split in map(int, given.split()) if runs.size.batch % split == 0] if given else TWINS
    orders = twins_of({"accumulate": runs.plan.accumulate}, runs.changes, splits)
    names = ["one-rank", *(f"twin-{split}" for split in (1, *splits))]
    return runs.run_beside(dict(zip(names, orders, strict=True)))


def twins_of(plan: dict[str, Any], changes: dict[str, Any], splits: Sequence[int] = TWINS) -> list[dict[str, Any]]:
    """Fields of orders: one rank; then its twins without the loss that balances experts, first in a single pass."""
    quiet = {**changes, "aux_coefficient": 0.0}
    twins = [{"plan": {**plan, "accumulate": split}, "changes": quiet} for split in (1, *splits)]
    return [{"plan": plan, "changes": changes}, *twins]


def reference_of(trajectories: Iterable[Trajectory], order: SmokeOrder) -> Reference:
    """Of one rank and its twins."""
    one, *twins = trajectories
    return Reference(one, tuple(twins), order.precision, depth_of(order.read_size()))


def check_follows(bench: Bench, name: str, seen: Trajectory, reference: Reference) -> None:
    """A check on losses and one on gradient norms; a third one that fails names the first step and module off."""
    found = compare_trajectories(seen, reference)
    checks = [replace(check, name=f"{name}.{quantity}") for quantity, check in found.items()]
    bench.checks += checks
    if all(check.passed for check in checks) or not seen.streams:
        return
    step, module = locate_departure(seen, reference)
    said = f"step {step}, {module or 'no single module'}" if step >= 0 else "no stream and no gradient of a part is off"
    bench.check(f"{name}.first-off", step < 0, said)
