"""The loss gate: may this FP8 recipe train in place of BF16? Curves in, verdict out.

Same seeds and same data make the difference between an FP8 run and its BF16 twin far smaller than the difference
between two seeds, so everything is judged on that *paired* gap, step by step:

- `steps`: each planned step once, in order, finite. Anything else fails; in BF16 it refuses, see `loss_refusals`.
- `gap.settled`: in the second half of the run, the smoothed gap of each seed, at its largest. Its bar is how far
  two BF16 seeds may lie apart by chance where they differ most: their spread there, times Student's t for the farthest
  of so many seeds, times the root of 2 for a difference of two runs; and 0.01 nats at most: few seeds, or seeds that
  differ much, never buy more room than that.
- `gap.tail`: the bias over the last fifth, mean over seeds. Noise averages out there and a fault does not: the bar of
  one seed by itself, divided by the square root of their number.
- `gap.learning`: the same in the first half, where a delay of few steps already is a large gap, and seeds differ more;
  0.01 nats at most there too. After the first tenth it has a bar of its own: what seeds do at the start is no leave.
- other gaps, noise and norms: in `loss_checks`; what the layers held: in `loss_observed`.

A gap that is scaled up stays red, whatever else is in the curves: no bar is computed from the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import TOOL
from ..evidence.loss_curve import LossCurve
from ..evidence.loss_curves import CurveSet, read_curves
from ..evidence.receipt import Check, Part
from .loss_checks import Extreme, check_norms, check_scales, make_check, to_json
from .loss_observed import check_observed, hold
from .loss_refusals import REFERENCE, Pairs, find_damage, find_refusals, pair_by_seed
from .loss_result import LossGateResult, LossOutcome, LossVerdict, SeedSeries
from .loss_statistics import CAP, find_largest, smooth, spread_of_seeds, subtract, t_95, t_of_largest


def judge_folder(folder: Path) -> LossGateResult:
    """The verdicts on a folder of curves.

    Raises:
        WrongArguments: there is no such folder.
    """
    return LossGateResult(tool=TOOL, folder=str(folder), verdicts=decide_curves(folder))


def decide_curves(folder: Path) -> tuple[LossVerdict, ...]:
    """The verdict on every FP8 recipe of every cell that left curves in a folder; none where there is no curve.

    An invalid file refuses the whole recipe that it is named after, and every recipe where it is BF16's.

    Raises:
        WrongArguments: there is no such folder.
    """
    return tuple(verdict for curves in read_curves(folder) for verdict in _decide_set(curves))


def _decide_set(curves: CurveSet) -> Iterator[LossVerdict]:
    """The verdicts on the recipes of one cell."""
    lost: dict[str, list[str]] = {}
    for fault in curves.unreadable:
        lost.setdefault(fault.file.stem.rpartition(".")[2].rpartition("-")[0], []).append(str(fault))
    held: dict[str, list[LossCurve]] = {}
    for curve in curves.curves:
        held.setdefault(curve.recipe, []).append(curve)
    recipes = sorted((held.keys() | lost.keys()) - {REFERENCE})
    if not recipes:
        lost[""] = [f"there are curves of {REFERENCE} alone. Next step: train the FP8 recipes too"]
    for recipe in recipes or [""]:
        if faults := (*lost.get(REFERENCE, ()), *lost.get(recipe, ())):
            yield LossVerdict(of=curves.of, recipe=recipe, outcome=LossOutcome.REFUSED, refusals=faults)
            continue
        others = [curve for curve in curves.curves if curve.recipe not in (REFERENCE, recipe)]
        verdict = decide_loss(held.get(REFERENCE, []), held[recipe], others)
        yield verdict.model_copy(update={"of": curves.of})


@dataclass(frozen=True)
class _Bounded:
    """Some windows, and how large a gap may be in them."""

    name: str
    windows: slice
    bar: float
    derivation: str


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
    if refusals := find_refusals(reference, candidate, others):
        return LossVerdict(recipe=recipe, outcome=LossOutcome.REFUSED, refusals=refusals)
    pairs = pair_by_seed(reference, candidate)
    steps = tuple(_check_steps(pair[side]) for side in (0, 1) for pair in pairs)
    if not all(check.passed for check in steps):
        return LossVerdict(recipe=recipe, outcome=LossOutcome.FAIL, checks=steps)
    planned = pairs[0][0].planned
    window, split = planned // 10, planned // 2  # windows from `split` on lie in the second half as a whole
    series = tuple(_smooth_pair(bf16, fp8, window) for bf16, fp8 in pairs)
    spread, early, later = (
        spread_of_seeds([each.reference[windows] for each in series])
        for windows in (slice(split, None), slice(0, split), slice(window, split))
    )
    factor, alone = t_of_largest(len(pairs)) * math.sqrt(2), t_95(len(pairs)) * math.sqrt(2)
    bar, early_bar = min(CAP, factor * spread), min(CAP, max(factor * early, factor * spread))
    said = f"{factor:.3g} (Student's t of {len(pairs)} seeds x the root of 2) x the largest spread of {REFERENCE} there"
    learning = (
        _Bounded("size", slice(0, split), early_bar, said),
        _Bounded("after the start", slice(window, split), min(CAP, factor * max(spread, later)), said),
    )
    held = hold([*candidate, *others])
    checks = (
        *steps,
        *_check_gap("gap.settled", series, _Bounded("size", slice(split, None), bar, said)),
        _check_tail(pairs, planned, min(CAP, alone * spread) / math.sqrt(len(pairs))),
        *_check_gap("gap.learning", series, *learning),
        *check_scales(pairs, planned, factor),
        *check_norms(pairs, planned, factor),
        *(check for _, fp8 in pairs for check in check_observed(fp8, held)),
    )
    passed = all(check.passed for check in checks)
    finite = all(math.isfinite(value) for each in series for value in (*each.reference, *each.gap))
    return LossVerdict(
        recipe=recipe, outcome=LossOutcome.PASS if passed else LossOutcome.FAIL, checks=checks, window=window, bar=bar,
        early_bar=early_bar, spread=to_json(spread), series=series if finite else (),
    )  # fmt: skip


def _check_steps(curve: LossCurve) -> Check:
    damage = find_damage(curve)
    part = Part("faults", len(damage), 0, not damage, f"each of {curve.planned} steps once, in order and finite")
    return Check(f"steps.{curve.recipe}.seed{curve.seed}", not damage, (part,), "; ".join(damage))


def _smooth_pair(bf16: LossCurve, fp8: LossCurve, window: int) -> SeedSeries:
    gap = smooth(subtract(fp8.losses, bf16.losses), window)
    return SeedSeries(seed=bf16.seed, steps=bf16.steps[window - 1 :], reference=smooth(bf16.losses, window), gap=gap)


def _check_gap(name: str, series: Sequence[SeedSeries], *bounded: _Bounded) -> Iterator[Check]:
    for each in series:
        parts, where = [], 0
        for one in bounded:
            worst, place = find_largest(each.gap[one.windows])
            passed = worst <= one.bar  # a NaN does not
            parts.append(Part(one.name, to_json(worst), to_json(one.bar), passed, f"{one.derivation}; {CAP} at most"))
            if not passed or one is bounded[0]:
                where = each.steps[one.windows][place]
        detail = f"largest in the window that ends at step {where}"
        yield Check(f"{name}.seed{each.seed}", all(part.passed for part in parts), tuple(parts), detail)


def _check_tail(pairs: Pairs, planned: int, bar: float) -> Check:
    start = planned - planned // 5
    gaps = [subtract(fp8.losses[start:], bf16.losses[start:]) for bf16, fp8 in pairs]
    bias = sum(map(sum, gaps)) / sum(map(len, gaps))
    said = f"Student's t of {len(pairs)} seeds x the root of 2 x the spread of {REFERENCE}, over the root of the seeds"
    return make_check("gap.tail", [Extreme(abs(bias), bar, f"{bias:+.4f} nats over steps {start} and later")], said)
