"""Ablation: runs with and without a feature take turns; what they show is a win, a tax, noise, or no evidence.

Runs come as off, on, off, on, and so forth. A machine that gets slower would make the arm that runs later look slower,
so a linear trend over the runs is estimated together with the effect and taken out of it. The spread is that of runs of
equal arms, with whatever drift is in it: Student's t with 2 x (pairs - 1) degrees of freedom gives the interval. A
change whose interval holds no change at all is noise.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field, JsonValue

from ..catalog.postures import Arm, Feature, Posture, merge_orders, settings_of
from ..environments.cell import own_folder
from ..environments.interpreter import InterpreterEnvironment, host_interpreter, read_commit
from ..environments.plan import RunOptions
from ..environments.venv import find_cpu_python
from ..errors import NothingSelected
from ..evidence.loss_curve import UNIT_ROUNDOFF, Depth
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen, Result
from ..process import Ended, Processes
from .loss import t_of

ArmName = Literal["off", "on"]
ARMS: Final[tuple[ArmName, ArmName]] = ("off", "on")


class Verdict(StrEnum):
    """What a change is."""

    WIN = "win"  # better, by more than its own spread
    TAX = "tax"  # worse, by more than its own spread
    NOISE = "noise"  # within its spread
    NOT_JUDGED = "not-judged"  # no evidence


class AblationRun(Frozen):
    """One run of an arm; committed receipts have fields that nothing reads any more.

    Attributes:
        arm: with the feature or without.
        ending: "done", or how it ended.
        words: what it said where it did not end well.
        seconds: wall time of the whole run.
        pattern, parameters: its layers, and how many parameters the whole model has.
        changes: numbers of the size, as they were trained; all of them.
        features, forms: those that it had.
        parts: name of a part -> the backend that was requested of it, and the one that was observed.
        step_seconds: of each step, in its order.
        losses: of each step, nats a prediction; None where it was no number.
        tokens: a step, on all ranks; 0 where nobody said.
        peak_bytes: most memory that a rank had in use; 0 where it was not measured.
    """

    model_config = ConfigDict(extra="ignore")

    arm: ArmName
    ending: str
    words: str = ""
    seconds: float = 0.0
    pattern: str = ""
    parameters: int = 0
    changes: dict[str, JsonValue] = Field(default_factory=dict)
    features: dict[str, JsonValue] = Field(default_factory=dict)
    forms: dict[str, JsonValue] = Field(default_factory=dict)
    parts: dict[str, dict[str, str]] = Field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()
    losses: tuple[float | None, ...] = ()
    tokens: int = 0
    peak_bytes: int = 0


class Change(Frozen):
    """What the feature changes of one number.

    Attributes:
        name: a row of `METRICS`.
        off, on: the number in the two arms, means of their runs: seconds, tokens a second, bytes, nats a prediction.
        ratio: on over off, a linear trend over the runs taken out.
        low, high: its interval, 95%.
        verdict: a win or a tax only where the interval leaves out 1.
    """

    name: str
    off: float
    on: float
    ratio: float
    low: float
    high: float
    verdict: Verdict


class FeatureAblation(Result):
    """The receipt of one feature.

    Attributes:
        tool, commit: that ran it.
        feature, title, plain, source: as the row says.
        base: what both arms began with: "posture" or "plain".
        off, on: whole orders of the two arms, but for the folder.
        runs: in the order of time, off and on in turn.
        changes: a row of each of `METRICS` that was measured; empty where the runs are no evidence.
        verdict: of the step time.
        reasons: why it was not judged; empty where it was.
    """

    schema_id: Literal["megacpp-validate/feature-ablation/2"] = "megacpp-validate/feature-ablation/2"
    commit: str = ""
    feature: str
    title: str
    plain: str
    source: str
    interpreter: str = ""
    base: Literal["posture", "plain"]
    off: dict[str, JsonValue]
    on: dict[str, JsonValue]
    runs: tuple[AblationRun, ...] = ()
    changes: tuple[Change, ...] = ()
    verdict: Verdict = Verdict.NOT_JUDGED
    reasons: tuple[str, ...] = ()


class AblationResult(Result):
    """What a call of the verb showed, feature by feature."""

    schema_id: Literal["megacpp-validate/ablation/2"] = "megacpp-validate/ablation/2"
    features: tuple[FeatureAblation, ...]

    @property
    def lacks(self) -> bool:
        """Whether a feature could not be judged, or none was selected; a tax is an answer, and closes nothing."""
        return not self.features or any(row.verdict is Verdict.NOT_JUDGED for row in self.features)


# Steps that compile, tune and fill caches, and are no part of a steady pace; of short runs the first quarter.
WARM: Final = 5
FEWEST: Final = 4  # steps whose times count
# Memory that nobody would miss: where runs agree to the byte any difference is sure, and an allocator rounds and keeps.
LEAST_MEMORY: Final = math.log(1.01)


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
        yield f"it ended as {run.ending}: {run.words or 'it wrote nothing'}"
        return
    times, steps = run.step_seconds, order["steps"]
    if not len(times) == len(run.losses) == steps:
        yield f"it has {len(times)} times and {len(run.losses)} losses of {steps} steps"
    elif steps - first_warm_step(steps) < FEWEST:
        yield f"{steps} steps are too few to be compared"
    if None in run.losses or not all(seconds > 0 for seconds in times):
        yield "a step has no finite loss, or took no time"
    for kind in ("changes", "features", "forms"):
        held = getattr(run, kind)
        for name, wanted in order.get(kind, {}).items():
            if _plain(held.get(name)) != _plain(wanted):
                got = _plain(held.get(name, "nothing"))
                yield f"{kind}.{name} was requested as {_plain(wanted)}, and the run reports {got}"
    for pattern, backends in arm.parts.items():
        found = {name: part for name, part in run.parts.items() if fnmatchcase(name, pattern)}
        if not found:
            yield f"no part {pattern} was seen, which must be on {' or '.join(backends)}"
        wrong = {name: part["observed"] for name, part in found.items() if part["observed"] not in backends}
        yield from (f"{name} ran on {seen}, and must be on {' or '.join(backends)}" for name, seen in wrong.items())


def _plain(value: Any) -> str:
    """A value in one form, whether a run reports it as JSON or as words."""
    return " ".join(re.findall(r"[\w.-]+", str(value))).lower()


def decide_feature(
    feature: Feature, orders: Mapping[ArmName, Mapping[str, Any]], runs: Sequence[AblationRun], pairs: int
) -> dict[str, Any]:
    """What the runs of a feature show: `changes`, `verdict` and `reasons` of `FeatureAblation`.

    Args:
        feature: its row.
        orders: of both arms, whole.
        runs: in the order of time, off and on in turn.
        pairs: that were requested, two or more.
    """
    arms: dict[ArmName, Arm] = {"off": feature.off, "on": feature.on}
    faults = [
        f"run {number} ({run.arm}): {fault}"
        for number, run in enumerate(runs, start=1)
        for fault in find_run_faults(arms[run.arm], orders[run.arm], run)
    ]
    if not faults and [run.arm for run in runs] != list(ARMS) * pairs:
        faults.append(f"{len(runs)} of {2 * pairs} runs are there")
    if faults:
        return {"reasons": tuple(faults)}
    changes = compare_runs(runs, str(orders["off"].get("precision", "fp32")))
    return {"changes": changes, "verdict": changes[0].verdict}


def compare_runs(runs: Sequence[AblationRun], precision: str) -> tuple[Change, ...]:
    """Every metric that all runs measured, the step time first.

    A loss changes by more than another order of sums does by itself: arms whose kernels always give the same bits have
    no spread of their own.

    Args:
        runs: off and on in turn, without a fault.
        precision: that the arms were trained in.
    """
    rounding = math.log1p(_round_off(runs[0], precision))
    found = []
    for name, measure, lower_is_better, least in (
        ("step_time", lambda run: statistics.median(_warm(run)), True, 0.0),
        ("tokens_per_second", lambda run: run.tokens / statistics.fmean(_warm(run)), False, 0.0),  # slow steps weigh in
        ("memory", lambda run: float(run.peak_bytes), True, LEAST_MEMORY),
        ("loss", lambda run: statistics.fmean(run.losses[-max(1, len(run.losses) // 4) :]), True, rounding),
    ):
        values = [measure(run) for run in runs]
        if all(value > 0 for value in values):
            found.append(compare(name, values, lower_is_better=lower_is_better, least=least))
    return tuple(found)


def _warm(run: AblationRun) -> tuple[float, ...]:
    """Seconds of the steps whose times count."""
    return run.step_seconds[first_warm_step(len(run.step_seconds)) :]


def compare(name: str, values: Sequence[float], *, lower_is_better: bool = True, least: float = 0.0) -> Change:
    """Positive numbers of runs that took turns, as a ratio.

    In: number = level + effect * on + trend * place + noise, the least squares estimate of the effect comes from what
    of the turns no straight line over the places explains (Frisch and Waugh 1933). Its half interval is Student's t at
    95% times the deviation of one run, pooled over runs of equal arms: 2 * (pairs - 1) degrees of freedom.

    Args:
        values: of two pairs or more.
        least: change of the logarithm under which it is noise, however sure.
    """
    logs, places, freedom = [math.log(value / values[0]) for value in values], range(len(values)), len(values) - 2
    turns = [0.0, 1.0] * (len(values) // 2)
    slope, start = statistics.linear_regression(places, turns)
    left = [turn - start - slope * place for turn, place in zip(turns, places, strict=True)]
    squares = math.fsum(one * one for one in left)
    change = math.fsum(one * log for one, log in zip(left, logs, strict=True)) / squares
    apart = math.fsum((log - statistics.fmean(arm)) ** 2 for arm in (logs[0::2], logs[1::2]) for log in arm)
    half = t_of(freedom + 1)[0] * math.sqrt(apart / freedom / squares)
    verdict = Verdict.NOISE
    if abs(change) > max(half, least):
        verdict = Verdict.WIN if (change < 0) is lower_is_better else Verdict.TAX
    return Change(
        name=name, off=statistics.fmean(values[0::2]), on=statistics.fmean(values[1::2]), ratio=math.exp(change),
        low=math.exp(change - half), high=math.exp(change + half), verdict=verdict,
    )  # fmt: skip


def _round_off(run: AblationRun, precision: str) -> float:
    """Relative error of the loss at the end of a run that rounding alone makes; 0 where no tokens were counted.

    What is lower than bf16 counts as that.
    """
    if not run.tokens:
        return 0.0
    hidden, wide = run.changes.get("hidden", 0), run.changes.get("ffn_hidden", 0)
    longest = max(2 * int(hidden), int(wide), 1)  # type: ignore[arg-type]
    depth = Depth(len(run.pattern) + 1, longest, run.tokens)
    return depth.floor(precision if precision in UNIT_ROUNDOFF else "bf16") * math.sqrt(len(run.losses))


# --- Running both arms. ---

ALL: Final = "all"
MODULE: Final = "megacpp_validate.training.smoke"
# Low, and reached late: at 3e-3 from the first step on, two arms that differed by roundings left the plateau of their
# first losses ten steps apart (H200, 2026-11-22), and a feature seemed to change the loss by 1 nat.
LEARNING_RATE: Final = 3e-4
_GRACE_S: Final = 60.0  # the run has a limit of its own, and reports which rank was late
_LAST_WORDS: Final = 600  # characters of a log that are kept


@dataclass(frozen=True)
class AblationOptions(RunOptions):
    """What the user gave.

    Attributes:
        features: ids, in the order in which they are run.
    """

    features: tuple[str, ...]
    size: str
    steps: int
    pairs: int
    device: Literal["cuda", "cpu"]


def read_features(words: Sequence[str], posture: Posture) -> tuple[str, ...]:
    """Ids from what was typed: `feature=recompute,mtp`, the same without `feature=`, or all.

    Raises:
        WrongArguments: a feature has no row.
        NothingSelected: no feature is named.
    """
    typed = [name for word in words for name in word.removeprefix("feature=").split(",") if name]
    if not typed:
        raise NothingSelected("no feature is selected. Next step: name one, as in feature=recompute, or all.")
    if ALL in typed:
        return tuple(feature.id for feature in posture.features)
    return tuple(dict.fromkeys(posture.find(name).id for name in typed))


def plan_arms(posture: Posture, feature: Feature, options: AblationOptions) -> dict[ArmName, dict[str, Any]]:
    """The whole order of each arm, but for its folder; they differ in the feature and in nothing else.

    Both begin with the posture, and nobody looking on; on a CPU with everything in its plain form.
    """
    plain = options.device == "cpu"
    switches = dict.fromkeys(posture.switches if plain else posture.observability, False)  # who looks on costs time
    order: dict[str, Any] = {
        "size": options.size, "changes": {}, "plan": {"data": 1}, "steps": options.steps,
        "seed": options.seed,
        "precision": "bf16" if options.device == "cuda" else "fp32", "device": options.device,
        "target": options.target, "features": {}, "forms": {}, "learning_rate": LEARNING_RATE,
        "warm_up": options.steps // 2,
    }  # fmt: skip
    order = merge_orders(order, settings_of(posture, switches))
    order = merge_orders(order, feature.both.as_order)
    return {"off": merge_orders(order, feature.off.as_order), "on": merge_orders(order, feature.on.as_order)}


def run_ablation(posture: Posture, options: AblationOptions, report: Callable[[str], None]) -> AblationResult:
    """Run every feature after the other; each receipt is written when its feature is through.

    Args:
        report: called with a line for each run that ended.

    Raises:
        NoEnvironment: there is no interpreter.
        ToolError: another run writes to the folder of the receipts.
        OSError: the receipts cannot be written.
    """
    rows: list[FeatureAblation] = []
    base: Literal["plain", "posture"] = "plain" if options.device == "cpu" else "posture"
    python = find_cpu_python(options.python) if base == "plain" else options.python
    environment, processes = host_interpreter(os.environ, python), Processes()
    with own_folder(options.receipts):
        for name in options.features:
            feature = posture.find(name)
            orders = plan_arms(posture, feature, options)
            runs = tuple(_run_in_turn(feature, orders, options, environment, processes, report))
            row = FeatureAblation(
                commit=read_commit(), interpreter=environment.shown, base=base, feature=name,
                **feature.model_dump(include={"title", "plain", "source"}), off=orders["off"], on=orders["on"],
                runs=runs, **decide_feature(feature, orders, runs, options.pairs),
            )  # fmt: skip
            write_whole(options.receipts / f"{name}.json", row.model_dump_json(indent=2) + "\n")
            rows.append(row)
            report(f"{name}: {row.verdict.value}")
    return AblationResult(features=tuple(rows))


def _run_in_turn(
    feature: Feature, orders: Mapping[ArmName, Mapping[str, Any]], options: AblationOptions,
    environment: InterpreterEnvironment, processes: Processes, report: Callable[[str], None],
) -> Iterator[AblationRun]:  # fmt: skip
    """Off, on, off, on. A run that is no evidence is the last: the same order would end alike."""
    for place in range(2 * options.pairs):
        arm: ArmName = ARMS[place % 2]
        home = options.receipts.absolute() / feature.id / f"{place + 1}-{arm}"
        home.mkdir(parents=True, exist_ok=True)
        given, log = home / "order.json", home / "log"
        write_whole(given, json.dumps({**orders[arm], "folder": str(home / "run"), "limit_s": options.limit_s}) + "\n")
        call = environment.call(MODULE)
        ended = processes.run(call, folder=home, limit_s=options.limit_s + _GRACE_S, log=log, given=given)
        run = read_run(ended, arm)
        report(f"{run.ending:12} {feature.id} {arm} {place + 1}/{2 * options.pairs} ({run.seconds:.1f} s)")
        yield run
        if any(find_run_faults(getattr(feature, arm), orders[arm], run)):
            return


def read_run(ended: Ended, arm: ArmName) -> AblationRun:
    """What a process answered: the last line that is an answer; libraries may write something after it."""
    lines = [line for line in ended.words.splitlines() if line.startswith("{") and '"ending"' in line]
    last = f"Its last words: {' '.join(ended.words.split())[-_LAST_WORDS:] or 'none'}"
    if lines:
        try:
            run = AblationRun(arm=arm, **_read_answer(json.loads(lines[-1])))
        except (LookupError, TypeError, ValueError) as fault:
            words = f"its answer has another form: {type(fault).__name__}: {fault}. {last}"
            return AblationRun(arm=arm, seconds=ended.seconds, ending="no-answer", words=words)
        if run.ending != "done" or not ended.code:
            return run
    words = f"it gave no answer. {last}" if not lines else f"it answers done, and its process ended so. {last}"
    return AblationRun(arm=arm, seconds=ended.seconds, ending=f"{ended.how} {ended.code}", words=words)


def _read_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a run, from what its one rank reports; it reports more than is read here."""
    fields: dict[str, Any] = {name: answer[name] for name in ("ending", "words", "seconds") if name in answer}
    for rank in answer["ranks"][:1]:
        model, steps, goodput = rank["model"], rank["steps"], rank["goodput"]
        fields |= {
            "pattern": model["pattern"], "parameters": model["parameters"], "changes": model["size"],
            "features": rank["features"], "forms": rank["forms"],
            "parts": {name: {key: part[key] for key in ("requested", "observed")}
                      for name, part in rank["choices"].items()},
            "step_seconds": [step["seconds"] for step in steps], "losses": [_finite(step["loss"]) for step in steps],
            "tokens": goodput["tokens"] // max(len(steps), 1),
            "peak_bytes": max(goodput["peak_bytes"].values(), default=0),
        }  # fmt: skip
    return fields


def _finite(loss: object) -> float | None:
    return loss if isinstance(loss, float) and math.isfinite(loss) else None  # what is no number comes as text
