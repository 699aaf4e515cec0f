"""What matched pairs of runs show of a feature: a win, a tax or noise; or why they show nothing.

Runs come as off, on, off, on, and so forth. A machine that gets slower would make the arm that runs later look slower,
so a linear trend over the runs is estimated together with the effect and taken out of it. The spread is that of runs of
equal arms, with whatever drift is in it: Student's t with 2 x (pairs - 1) degrees of freedom gives the interval. A
change that its interval does not set apart from nothing, or that is no larger than between two runs of one arm, is
noise.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, JsonValue

from ..catalog.postures import Arm, Feature
from ..errors import EvidenceMissing, Exit, exit_for
from ..evidence.rounding import UNIT_ROUNDOFF, Depth
from ..evidence.strict_json import read_strict_json
from ..evidence.values import Frozen
from .loss_statistics import sample_deviation, t_95

ArmName = Literal["off", "on"]
ARMS: Final[tuple[ArmName, ArmName]] = ("off", "on")


class Verdict(StrEnum):
    """What a change is."""

    WIN = "win"  # better, by more than its own spread
    TAX = "tax"  # worse, by more than its own spread
    NOISE = "noise"  # within its spread
    NOT_JUDGED = "not-judged"  # no evidence


class AblationInvalid(EvidenceMissing):
    """A file that is not a receipt of an ablation."""


class ObservedPart(Frozen):
    """What a part of the model was asked for and what it took."""

    requested: str
    observed: str


class AblationRun(Frozen):
    """One run of an arm.

    Attributes:
        arm: with the feature or without.
        place: among all runs of the feature, from 0, in the order of time.
        ending: "done", or how it ended.
        words: what it said where it did not end well.
        seconds: wall time of the whole run.
        model: name of its size.
        pattern, parameters: its layers, and how many parameters the whole model has.
        topology: as the first rank says it, but for its place and the name of its host.
        changes: numbers of the size, as they were trained; all of them.
        features, forms: those that it had.
        parts: name of a part -> what it took.
        step_seconds: of each step, the slowest rank's.
        losses: of each step, nats a prediction; None where it was no number.
        tokens: a step, on all ranks; 0 where nobody said.
        peak_bytes: most memory that a rank had in use; 0 where nobody asked.
        versions: of what was loaded.
        file: receipts of its ranks, relative to the folder of the ablation.
    """

    arm: ArmName
    place: int = Field(ge=0)
    ending: str
    words: str = ""
    seconds: float = 0.0
    model: str = ""
    pattern: str = ""
    parameters: int = 0
    topology: dict[str, JsonValue] = Field(default_factory=dict)
    changes: dict[str, JsonValue] = Field(default_factory=dict)
    features: dict[str, JsonValue] = Field(default_factory=dict)
    forms: dict[str, JsonValue] = Field(default_factory=dict)
    parts: dict[str, ObservedPart] = Field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()
    losses: tuple[float | None, ...] = ()
    tokens: int = 0
    peak_bytes: int = 0
    versions: dict[str, JsonValue] = Field(default_factory=dict)
    file: str = ""


class Change(Frozen):
    """What the feature changes of one number, as the ratio of the arm with it to the arm without.

    Attributes:
        off, on: the number in the two arms, means of their runs: seconds, tokens a second, bytes.
        ratio: on over off, a linear trend over the runs taken out.
        low, high: its interval, 95%.
        repeats: how far runs of the same arm lie apart at most, as a ratio from 1 up.
        verdict: a win or a tax only where the interval leaves out 1, and the change is larger than `repeats`.
    """

    off: float
    on: float
    ratio: float
    low: float
    high: float
    repeats: float
    verdict: Verdict


class LossChange(Frozen):
    """What the feature changes of the loss at the end.

    Attributes:
        off, on: mean loss over the last quarter of the steps, nats a prediction.
        difference: on minus off, step by step.
        half: of its interval, 95%.
        repeats: how far runs of the same arm lie apart at most.
        rounding: what another order of sums does to the loss of these steps by itself; 0 where nobody counted tokens.
        steps: of the last quarter.
        changes: whether the difference is larger than all three.
        identical: whether it is 0 in every one of these steps.
    """

    off: float
    on: float
    difference: float
    half: float
    repeats: float
    rounding: float = 0.0
    steps: int
    changes: bool
    identical: bool


class FeatureAblation(Frozen):
    """The receipt of one feature.

    Attributes:
        tool, commit: that ran it.
        feature, title, plain, source: as the row says.
        size, seed, steps, pairs, ranks, device, interpreter: as it was asked.
        base: what both arms began with: "posture" or "plain".
        off, on: whole orders of the two arms, but for the folder.
        runs: in the order of time, off and on in turn.
        warm: from which step on times count.
        step_time: seconds a step, the median of a run; lower is better.
        tokens_per_second: of the mean step; higher is better.
        memory: most bytes in use; lower is better.
        loss: at the end.
        verdict: of the step time.
        reasons: why it was not judged; empty where it was.
    """

    schema_id: Literal["megacpp-validate/feature-ablation/1"] = "megacpp-validate/feature-ablation/1"
    tool: str
    commit: str = ""
    feature: str
    title: str
    plain: str
    source: str
    size: str
    seed: int
    steps: int
    pairs: int
    ranks: int
    device: str
    interpreter: str = ""
    base: Literal["posture", "plain"]
    off: dict[str, JsonValue]
    on: dict[str, JsonValue]
    runs: tuple[AblationRun, ...] = ()
    warm: int = 0
    step_time: Change | None = None
    tokens_per_second: Change | None = None
    memory: Change | None = None
    loss: LossChange | None = None
    verdict: Verdict
    reasons: tuple[str, ...] = ()


class AblationResult(Frozen):
    """What a call of the verb showed, feature by feature."""

    schema_id: Literal["megacpp-validate/ablation/1"] = "megacpp-validate/ablation/1"
    tool: str
    features: tuple[FeatureAblation, ...]

    @property
    def holds(self) -> bool:
        """Whether every feature was judged."""
        return bool(self.features) and all(row.verdict is not Verdict.NOT_JUDGED for row in self.features)

    @property
    def exit(self) -> Exit:
        """A tax is an answer, and closes nothing; a feature that could not be judged is missing evidence."""
        return exit_for(breaks=False, lacks=not self.holds)


# Steps that compile, tune and fill caches, and are no part of a steady pace; of short runs the first quarter.
WARM: Final = 5
FEWEST: Final = 4  # steps whose times count
# Memory that nobody would miss: where runs agree to the byte any difference is sure, and an allocator rounds and keeps.
LEAST_MEMORY: Final = math.log(1.01)
_STATE: Final = ("changes", "features", "forms")


def first_warm_step(steps: int) -> int:
    """From which step on times count."""
    return min(WARM, steps // 4)


def find_run_faults(arm: Arm, order: Mapping[str, Any], run: AblationRun) -> Iterator[str]:
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


def decide_feature(
    feature: Feature, orders: Mapping[ArmName, Mapping[str, Any]], runs: Sequence[AblationRun], pairs: int
) -> dict[str, Any]:
    """What the runs of a feature show: the fields `warm` to `reasons` of `FeatureAblation`.

    Args:
        feature: its row.
        orders: of both arms, whole.
        runs: in the order of time, off and on in turn.
        pairs: that were asked for.
    """
    arms: dict[ArmName, Arm] = {"off": feature.off, "on": feature.on}
    faults = [
        f"run {run.place + 1} ({run.arm}): {fault}"
        for run in runs
        for fault in find_run_faults(arms[run.arm], orders[run.arm], run)
    ]
    if pairs < 2:
        faults.append("one pair shows no spread: at least two pairs are needed")
    if not faults and [run.arm for run in runs] != list(ARMS) * pairs:
        faults.append(f"{len(runs)} of {2 * pairs} runs are there")
    warm = first_warm_step(orders["off"]["steps"])
    if faults:
        return {"warm": warm, "verdict": Verdict.NOT_JUDGED, "reasons": tuple(faults)}
    series = [run.step_seconds[warm:] for run in runs]
    times = compare([statistics.median(one) for one in series])
    tokens = [run.tokens / statistics.fmean(one) for run, one in zip(runs, series, strict=True)]  # slow steps weigh in
    memory = [float(run.peak_bytes) for run in runs]
    return {
        "warm": warm,
        "step_time": times,
        "tokens_per_second": compare(tokens, lower_is_better=False) if all(tokens) else None,
        "memory": compare(memory, least=LEAST_MEMORY) if all(memory) else None,
        "loss": compare_losses(runs, str(orders["off"].get("precision", "fp32"))),
        "verdict": times.verdict,
    }


def compare(values: Sequence[float], *, lower_is_better: bool = True, least: float = 0.0) -> Change:
    """Positive numbers of runs that took turns, as a ratio.

    In: number = level + effect * on + trend * place + noise, the least squares estimate of the effect is a weighted sum
    of the runs' logarithms, and its variance that of one run times the sum of the squared weights.

    Args:
        values: of two pairs or more.
        least: change of the logarithm under which it is noise, however sure.
    """
    logs, places = [math.log(value) for value in values], range(len(values))
    turns = [-0.5 if place % 2 == 0 else 0.5 for place in places]
    line = [place - (len(values) - 1) / 2 for place in places]
    slope = _dot(turns, line) / _dot(line, line)
    left = [turn - slope * at for turn, at in zip(turns, line, strict=True)]  # what no straight line explains
    weights = [one / _dot(left, left) for one in left]
    change, half, repeats = _dot(weights, logs), _half(logs) * math.hypot(*weights), _find_repeats(logs)
    verdict = Verdict.NOISE
    if abs(change) > max(half, repeats) and abs(change) >= least:
        verdict = Verdict.WIN if (change < 0) is lower_is_better else Verdict.TAX
    return Change(
        off=statistics.fmean(values[0::2]), on=statistics.fmean(values[1::2]), ratio=math.exp(change),
        low=_exp(change - half), high=_exp(change + half), repeats=_exp(repeats), verdict=verdict,
    )  # fmt: skip


def compare_losses(runs: Sequence[AblationRun], precision: str) -> LossChange:
    """The loss over the last quarter of the steps: both arms see the same data.

    It changes where the difference is larger than its own interval (of runs of equal arms, and of steps), than runs of
    one arm lie apart, and than what another order of sums does by itself: arms whose kernels always give the same bits
    have no spread of their own.

    Args:
        runs: off and on in turn.
        precision: that the arms were trained in; what is lower than bf16 counts as that.

    Raises:
        ValueError: a loss is not a number.
    """
    losses = [[math.nan if loss is None else loss for loss in run.losses] for run in runs]
    steps = max(1, len(losses[0]) // 4)
    last = [one[-steps:] for one in losses]
    if not all(map(math.isfinite, (value for one in last for value in one))):
        raise ValueError("a loss that is not a number cannot be compared")
    means = [math.fsum(one) / steps for one in last]
    off, on = statistics.fmean(means[0::2]), statistics.fmean(means[1::2])
    # Pairs of one seed are no independent draws: they are averaged, and do not narrow the interval over steps.
    gaps = [statistics.fmean(column[1::2]) - statistics.fmean(column[0::2]) for column in zip(*last, strict=True)]
    over_steps = t_95(steps) * sample_deviation(gaps) / math.sqrt(steps) if steps > 1 else 0.0
    half, repeats = max(_half(means) * math.sqrt(4 / len(means)), over_steps), _find_repeats(means)
    rounding = _round_off(runs[0], precision) * abs(off)
    return LossChange(
        off=off, on=on, difference=on - off, half=half, repeats=repeats, rounding=rounding, steps=steps,
        changes=abs(on - off) > max(half, repeats, rounding),
        identical=all(a == b for a, b in zip(last[0::2], last[1::2], strict=True)),
    )  # fmt: skip


def _half(runs: Sequence[float]) -> float:
    """Student's t at 95% times the deviation of one run, of equal arms, pooled: 2 * (pairs - 1) degrees of freedom."""
    freedom = len(runs) - 2
    squares = [(run - statistics.fmean(arm)) ** 2 for arm in (runs[0::2], runs[1::2]) for run in arm]
    return t_95(freedom + 1) * math.sqrt(math.fsum(squares) / freedom)


def _find_repeats(runs: Sequence[float]) -> float:
    """How far two runs of one arm lie apart at most."""
    return max(max(arm) - min(arm) for arm in (runs[0::2], runs[1::2]))


def _round_off(run: AblationRun, precision: str) -> float:
    """Relative error of the loss at the end of a run that rounding alone makes."""
    if not run.tokens:
        return 0.0
    hidden, wide = (run.changes.get(name) for name in ("hidden", "ffn_hidden"))
    longest = max(2 * hidden if isinstance(hidden, int) else 1, wide if isinstance(wide, int) else 1)
    depth = Depth(len(run.pattern) + 1, longest, run.tokens)
    return depth.floor(precision if precision in UNIT_ROUNDOFF else "bf16") * math.sqrt(len(run.losses))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def read_ablation(path: Path) -> FeatureAblation:
    """A receipt from its file.

    Raises:
        AblationInvalid: the file cannot be read, is no receipt of an ablation, or contradicts itself.
    """
    try:
        text = path.read_bytes()
        read_strict_json(text)
        read = FeatureAblation.model_validate_json(text)
        faults = "; ".join(_find_contradictions(read))
    except (OSError, ValueError) as fault:
        faults = str(fault)
    if faults:
        raise AblationInvalid(
            f"{path} is not a valid receipt of an ablation: {faults}. Likely cause: the file was edited, cut short, or "
            "written by another version. Next step: run the feature again."
        )
    return read


def _find_contradictions(read: FeatureAblation) -> Iterator[str]:
    """What no ablation writes."""
    for place, run in enumerate(read.runs):
        if (run.place, run.arm) != (place, ARMS[place % 2]):
            yield f"run {place} is {run.arm} at place {run.place}: off and on are to take turns"
    if read.verdict is Verdict.NOT_JUDGED:
        if not read.reasons:
            yield "it was not judged, and it does not say why"
        return
    if len(read.runs) != 2 * read.pairs or any(run.ending != "done" for run in read.runs):
        yield f"a verdict from {len(read.runs)} runs of {read.pairs} pairs, or from one that did not end well"
    if read.step_time is None or read.step_time.verdict is not read.verdict:
        yield "its verdict is not that of the step time"
    for name in ("step_time", "tokens_per_second", "memory"):
        change: Change | None = getattr(read, name)
        if change is not None and not change.low <= change.ratio <= change.high:
            yield f"{name}: {change.ratio:g} lies outside of its interval"
        if change is not None and change.verdict is not Verdict.NOISE and change.low <= 1 <= change.high:
            yield f"{name}: a {change.verdict.value} whose interval holds 1"
