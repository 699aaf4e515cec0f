"""What matched pairs show of a feature: a win, a tax or noise; or why they show nothing."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from ..catalog.postures import Arm, Feature
from ..evidence.rounding import UNIT_ROUNDOFF, Depth
from .ablation_result import ARMS, ArmName, Change, LossChange, RunSeen, Verdict
from .ablation_statistics import block_deviation, estimate_effect, estimate_shift, half_between

# Steps that compile, tune and fill caches, and are no part of a steady pace; of short runs the first quarter.
WARM: Final = 5
FEWEST: Final = 4  # steps whose times count: a block needs neighbours
# Memory that nobody would miss: where runs agree to the byte any difference is sure, and an allocator rounds and keeps.
LEAST_MEMORY: Final = math.log(1.01)
_STATE: Final = ("changes", "features", "forms")


def first_warm_step(steps: int) -> int:
    """From which step on times count."""
    return min(WARM, steps // 4)


def find_faults(feature: Feature, orders: Mapping[ArmName, Mapping[str, Any]], runs: Sequence[RunSeen]) -> list[str]:
    """Why runs are no evidence of a feature: one did not end well, did not have what it asked for, or is too short."""
    arms: dict[ArmName, Arm] = {"off": feature.off, "on": feature.on}
    return [
        f"run {run.place + 1} ({run.arm}): {fault}"
        for run in runs
        for fault in find_run_faults(arms[run.arm], orders[run.arm], run)
    ]


def find_run_faults(arm: Arm, order: Mapping[str, Any], run: RunSeen) -> Iterator[str]:
    """Why one run is no evidence of its arm.

    Args:
        arm: of the row, with the backends that its parts must have been seen on.
        order: that the run was given, whole.
        run: as it was seen.
    """
    if run.ending != "done":
        yield f"it ended as {run.ending}: {run.words or 'it said nothing'}"
        return
    if len(run.step_seconds) != order["steps"] or len(run.losses) != order["steps"]:
        yield f"it has {len(run.step_seconds)} times and {len(run.losses)} losses of {order['steps']} steps"
    elif len(run.step_seconds) - first_warm_step(len(run.step_seconds)) < FEWEST:
        yield f"{len(run.step_seconds)} steps are too few to be compared"
    if any(loss is None for loss in run.losses):
        yield f"its loss is no number in step {run.losses.index(None)}"
    if not all(seconds > 0 for seconds in run.step_seconds):
        yield "a step took no time"
    for kind in _STATE:
        held = getattr(run, kind)
        for name, wanted in order.get(kind, {}).items():
            if _plain(held.get(name)) != _plain(wanted):
                said = held.get(name, "nothing")
                yield f"{kind}.{name} was asked to be {_plain(wanted)}, and its receipt says {_plain(said)}"
    yield from _find_part_faults(arm, run)


def _find_part_faults(arm: Arm, run: RunSeen) -> Iterator[str]:
    """Parts that ran on what the arm does not have, and patterns that no part has."""
    for pattern, backends in arm.parts.items():
        found = {name: part for name, part in run.parts.items() if fnmatchcase(name.partition("@")[0], pattern)}
        if not found:
            yield f"no part {pattern} was seen, which must be on {' or '.join(backends)}"
        wrong = {name: part.observed for name, part in found.items() if part.observed not in backends}
        for name, observed in list(wrong.items())[:3]:
            yield f"{name} ran on {observed}, and must be on {' or '.join(backends)}"


def _plain(value: Any) -> str:
    """A value in one form, whether a receipt has it as JSON or as words."""
    return " ".join(re.findall(r"[\w.-]+", str(value))).lower()


def compare_step_times(runs: Sequence[RunSeen], warm: int) -> Change:
    """The median step of each run, in seconds."""
    series = [run.step_seconds[warm:] for run in runs]
    return _compare(
        [statistics.median(one) for one in series],
        [block_deviation(one, lambda drawn: math.log(statistics.median(drawn))) for one in series],
        lower_is_better=True,
    )


def compare_tokens(runs: Sequence[RunSeen], warm: int) -> Change | None:
    """Tokens a second of the mean step, which slow steps weigh in; None where nobody counted tokens."""
    if not all(run.tokens for run in runs):
        return None
    series = [run.step_seconds[warm:] for run in runs]
    return _compare(
        [run.tokens / statistics.fmean(one) for run, one in zip(runs, series, strict=True)],
        [block_deviation(one, lambda drawn: math.log(statistics.fmean(drawn))) for one in series],
        lower_is_better=False,
    )


def compare_memory(runs: Sequence[RunSeen]) -> Change | None:
    """The most bytes that were in use; None where nobody asked."""
    if not all(run.peak_bytes for run in runs):
        return None
    return _compare(
        [float(run.peak_bytes) for run in runs], [0.0] * len(runs), lower_is_better=True, least=LEAST_MEMORY
    )


def compare_losses(runs: Sequence[RunSeen], precision: str) -> LossChange:
    """The loss over the last quarter of the steps, pair by pair and step by step: both arms see the same data.

    It changes where the difference is larger than its own interval (of neighbouring steps, and of runs of equal arms,
    which two runs that agreed by luck make too narrow: Student's t), than runs of one arm lie apart, and than what
    another order of sums does by itself: arms whose kernels always give the same bits have no spread of their own.

    Args:
        runs: off and on in turn.
        precision: that the arms were trained in; what is lower than bf16 counts as that.

    Raises:
        ValueError: a loss that is no number.
    """
    losses = [[math.nan if loss is None else loss for loss in run.losses] for run in runs]
    steps = max(1, len(losses[0]) // 4)
    last = [one[-steps:] for one in losses]
    if not all(map(math.isfinite, (value for one in last for value in one))):
        raise ValueError("a loss that is no number: such runs are told, not compared")
    means = [math.fsum(one) / steps for one in last]
    off, on = means[0::2], means[1::2]
    # Pairs of one seed are no independent draws: they are averaged, and do not narrow the interval.
    gaps = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(last[0::2], last[1::2], strict=True)]
    difference, half = estimate_shift([math.fsum(column) / len(column) for column in zip(*gaps, strict=True)])
    half = max(half, half_between(means))
    repeats = max(max(arm) - min(arm) for arm in (off, on))
    rounding = _rounding(runs[0], precision) * abs(statistics.fmean(off))
    return LossChange(
        off=statistics.fmean(off),
        on=statistics.fmean(on),
        difference=difference,
        half=half,
        repeats=repeats,
        rounding=rounding,
        steps=steps,
        changes=abs(difference) > max(half, repeats, rounding),
        identical=all(value == 0 for gap in gaps for value in gap),
    )


def _rounding(run: RunSeen, precision: str) -> float:
    """Relative error of the loss at the end of a run that rounding alone makes."""
    if not run.tokens:
        return 0.0
    hidden, wide = (run.changes.get(name) for name in ("hidden", "ffn_hidden"))
    longest = max(2 * hidden if isinstance(hidden, int) else 1, wide if isinstance(wide, int) else 1)
    depth = Depth(len(run.pattern) + 1, longest, run.tokens)
    return depth.floor(precision if precision in UNIT_ROUNDOFF else "bf16") * math.sqrt(len(run.losses))


def decide_feature(
    feature: Feature, orders: Mapping[ArmName, Mapping[str, Any]], runs: Sequence[RunSeen], pairs: int
) -> dict[str, Any]:
    """What the runs of a feature show: the fields `warm` to `reasons` of `FeatureAblation`.

    Args:
        feature: its row.
        orders: of both arms, whole.
        runs: in the order of time, off and on in turn.
        pairs: that were asked for.
    """
    faults = find_faults(feature, orders, runs)
    if pairs < 2:
        faults.append("one pair shows no spread: runs of equal arms are to be compared, so two pairs are the least")
    if not faults and [run.arm for run in runs] != list(ARMS) * pairs:
        faults.append(f"{len(runs)} of {2 * pairs} runs are there")
    warm = first_warm_step(orders["off"]["steps"])
    if faults:
        return {"warm": warm, "verdict": Verdict.NOT_JUDGED, "reasons": tuple(faults)}
    times = compare_step_times(runs, warm)
    return {
        "warm": warm,
        "step_time": times,
        "tokens_per_second": compare_tokens(runs, warm),
        "memory": compare_memory(runs),
        "loss": compare_losses(runs, str(orders["off"].get("precision", "fp32"))),
        "verdict": times.verdict,
    }


def _compare(
    values: Sequence[float], deviations: Sequence[float], *, lower_is_better: bool, least: float = 0.0
) -> Change:
    """Positive numbers of runs that took turns, as a ratio.

    Args:
        deviations: of their logarithms.
        least: change of the logarithm under which it is noise, however sure.
    """
    effect = estimate_effect([math.log(value) for value in values], deviations)
    verdict = Verdict.NOISE
    if not effect.is_noise and abs(effect.change) >= least:
        verdict = Verdict.WIN if (effect.change < 0) is lower_is_better else Verdict.TAX
    return Change(
        off=statistics.fmean(values[0::2]),
        on=statistics.fmean(values[1::2]),
        ratio=math.exp(effect.change),
        low=_exp(effect.change - effect.half),
        high=_exp(effect.change + effect.half),
        repeats=_exp(effect.repeats),
        verdict=verdict,
    )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
