"""The loss gate: may this FP8 recipe train in place of BF16? Curves in, verdict out.

Same seeds and same data make the difference between an FP8 run and its BF16 twin far smaller than the difference
between two seeds, so everything is judged on that *paired* gap, step by step:

- `steps`: each planned step once, in order, finite. Anything else fails; in BF16 it refuses, see `loss_records`.
- `gap.settled`: in the second half of the run, the smoothed gap of each seed, at its largest. Its bar is how far
  two BF16 seeds may lie apart by chance where they differ most: their spread there, times Student's t for the farthest
  of so many seeds, times the root of 2 for a difference of two runs; and 0.01 nats at most: few seeds, or seeds that
  differ much, never buy more room than that.
- `gap.tail`: the bias over the last fifth, mean over seeds. Noise averages out there and a fault does not: the bar of
  one seed by itself, divided by the square root of their number.
- `gap.learning`: the same in the first half, where a delay of few steps already is a large gap, and seeds differ more;
  0.01 nats at most there too. After the first tenth it has a bar of its own: what seeds do at the start is no leave.
- `gap.short`, `gap.noise`, `part_loss`: in `loss_scales`, what a long mean levels out, and the parts of the data.
- `gradient_norm`, `part_norm`: in `loss_norms`, what Adam hides from the loss.
- `observed`: in `loss_observed`, what the layers held, and which layers did.

A gap that is scaled up stays red, whatever else is in the curves: no bar is computed from the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.evidence.receipt import Check, Part

from .loss_norms import check_norms
from .loss_observed import check_observed, hold
from .loss_pairs import REFERENCE, find_damage, find_refusals, pair_by_seed
from .loss_records import find_wrong_records
from .loss_result import LossOutcome, LossVerdict, SeedSeries
from .loss_scales import check_scales
from .loss_statistics import CAP, smooth, spread_of_seeds, subtract, t_95, t_of_largest


@dataclass(frozen=True)
class Stretches:
    """Stretches of a run of `planned` steps, in steps."""

    planned: int

    @property
    def window(self) -> int:
        """Length of a window of the smoothing."""
        return self.planned // 10

    @property
    def half(self) -> int:
        """First step of the second half."""
        return self.planned // 2

    @property
    def tail(self) -> int:
        """First step of the last fifth."""
        return self.planned - self.planned // 5

    @property
    def matched(self) -> int:
        """End of the first part, where weights are still nearly equal."""
        return self.planned // 20


@dataclass(frozen=True)
class _Bounded:
    """Some windows, and how large a gap may be in them."""

    name: str
    windows: slice
    bar: float
    derivation: str


Pairs = Sequence[tuple[LossCurve, LossCurve]]


def decide_loss(
    reference: Sequence[LossCurve], candidate: Sequence[LossCurve], others: Sequence[LossCurve] = ()
) -> LossVerdict:
    """Decide on one FP8 recipe.

    Args:
        reference: BF16, at least three seeds.
        candidate: the recipe, with the same seeds, data and number of planned steps.
        others: runs of other FP8 recipes that trained the same model; layers that cast there must cast here.

    Returns:
        `REFUSED` with the reasons where the curves cannot be compared, or BF16 is damaged or none; `FAIL` where any
        check is out of its bound; else `PASS`. It never raises for what is in a curve.
    """
    recipe = next((curve.recipe for curve in candidate), "")
    if refusals := (*find_refusals(reference, candidate, others), *find_wrong_records(reference, candidate)):
        return LossVerdict(recipe=recipe, outcome=LossOutcome.REFUSED, refusals=refusals)
    pairs = pair_by_seed(reference, candidate)
    steps = tuple(_check_steps(curve) for curve in (*(pair[0] for pair in pairs), *(pair[1] for pair in pairs)))
    if not all(check.passed for check in steps):
        return LossVerdict(recipe=recipe, outcome=LossOutcome.FAIL, checks=steps)
    at = Stretches(pairs[0][0].planned)
    series = tuple(_smooth_pair(bf16, fp8, at) for bf16, fp8 in pairs)
    smoothed = [each.reference for each in series]
    split = at.half  # windows from here on lie in the second half as a whole
    spread = spread_of_seeds([values[split:] for values in smoothed])
    early_spread = spread_of_seeds([values[:split] for values in smoothed])
    factor = t_of_largest(len(pairs)) * math.sqrt(2)
    bar, early_bar = min(CAP, factor * spread), min(CAP, max(factor * early_spread, factor * spread))
    alone = t_95(len(pairs)) * math.sqrt(2)  # of one mean of all seeds, none of which is the farthest
    said = _say_bar(factor, f"the farthest of {len(pairs)} seeds", at)
    settled = said.format("second", spread)
    of_all = f"{_say_bar(alone, f'{len(pairs)} seeds', at)}, over their root".format("second", spread)
    learning = (
        _Bounded("size", slice(0, split), early_bar, said.format("first", early_spread)),
        _bound_later(smoothed, at, spread, factor, said),
    )
    held = hold([*candidate, *others])
    checks = (
        *steps,
        *_check_gap("gap.settled", series, _Bounded("size", slice(split, None), bar, settled)),
        _check_tail(pairs, at, min(CAP, alone * spread) / math.sqrt(len(pairs)), of_all),
        *_check_gap("gap.learning", series, *learning),
        *check_scales(pairs, at.planned, factor),
        *check_norms(pairs, at.planned, at.matched, factor),
        *(check for _, fp8 in pairs for check in check_observed(fp8, held)),
    )
    outcome = LossOutcome.PASS if all(check.passed for check in checks) else LossOutcome.FAIL
    return LossVerdict(
        recipe=recipe,
        outcome=outcome,
        checks=checks,
        window=at.window,
        bar=bar,
        early_bar=early_bar,
        spread=_finite(spread),
        series=series if all(math.isfinite(v) for each in series for v in (*each.reference, *each.gap)) else (),
    )


def _say_bar(factor: float, whose: str, at: Stretches) -> str:
    """Where a bar comes from, with places for the half of the run and the spread."""
    return (
        f"{factor:.3g} (Student's t of {whose} x the root of 2, for a difference of two runs) x the largest spread of "
        f"{REFERENCE} in a window of {at.window} steps of the {{}} half, {{:.3g}} nats; {CAP} at most"
    )


def _bound_later(
    smoothed: Sequence[Sequence[float]], at: Stretches, spread: float, factor: float, said: str
) -> _Bounded:
    """The first half without its start, whose seeds are far apart for a while."""
    windows = slice(at.window, at.half)
    own = max(spread, spread_of_seeds([values[windows] for values in smoothed]))
    derivation = f"{said.format('first', own)}; windows from step {at.window} on"
    return _Bounded("after the start", windows, min(CAP, factor * own), derivation)


def _check_steps(curve: LossCurve) -> Check:
    damage = find_damage(curve)
    part = Part("faults", len(damage), 0, not damage, f"each of {curve.planned} steps once, in order and finite")
    return Check(f"steps.{curve.recipe}.seed{curve.seed}", not damage, (part,), "; ".join(damage))


def _smooth_pair(bf16: LossCurve, fp8: LossCurve, at: Stretches) -> SeedSeries:
    return SeedSeries(
        seed=bf16.seed,
        steps=bf16.steps[at.window - 1 :],
        reference=smooth(bf16.losses, at.window),
        gap=smooth(subtract(fp8.losses, bf16.losses), at.window),
    )


def _check_gap(name: str, series: Sequence[SeedSeries], *bounded: _Bounded) -> Iterator[Check]:
    for each in series:
        parts, where = [], 0
        for one in bounded:
            worst = _largest(each.gap[one.windows])
            passed = worst <= one.bar  # a NaN does not
            parts.append(Part(one.name, _finite(worst), _finite(one.bar), passed, one.derivation))
            if not passed or one is bounded[0]:
                sizes = [abs(value) for value in each.gap[one.windows]]
                where = each.steps[one.windows][sizes.index(worst) if worst in sizes else 0]
        detail = f"largest in the window that ends at step {where}"
        yield Check(f"{name}.seed{each.seed}", all(part.passed for part in parts), tuple(parts), detail)


def _check_tail(pairs: Pairs, at: Stretches, bar: float, derivation: str) -> Check:
    gaps = [subtract(fp8.losses[at.tail :], bf16.losses[at.tail :]) for bf16, fp8 in pairs]
    bias = sum(map(sum, gaps)) / sum(map(len, gaps))
    return _check("gap.tail", abs(bias), bar, derivation, f"{bias:+.4f} nats over steps {at.tail} and later")


def _check(name: str, observed: float, bound: float, derivation: str, detail: str) -> Check:
    passed = observed <= bound  # a NaN does not
    return Check(name, passed, (Part("size", _finite(observed), _finite(bound), passed, derivation),), detail)


def _finite(value: float) -> float | None:
    """The value as JSON can have it: finite losses may have sums that are not."""
    return value if math.isfinite(value) else None


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(map(abs, values))
