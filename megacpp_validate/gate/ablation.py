"""Ablation: steps without and with a feature take turns until they show a win, a tax, or no effect larger than 5%.

Both arms live in one process and read the same batches. A block of steps without the feature and one with it are a
pair; pairs run A B B A, so that a linear drift cancels in each two. After four pairs, and after each two more, the mean
of log(on / off) has the interval of Student's t. Look k spends the share 1 / (k (k + 1)) of `ALPHA`; all shares
together are 1 however long it goes on, so that looking often makes no false verdict more likely (alpha spending, after
Lan and DeMets 1983). The interval decides, or the budget of pairs or seconds ends, and the feature stays undecided.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Final, Literal

from pydantic import Field, JsonValue

from ..catalog.policies import Fp8Policy
from ..catalog.postures import Arm, Feature, Posture, merge_orders, settings_of
from ..environments.cell import own_folder
from ..environments.interpreter import InterpreterEnvironment, host_interpreter, read_commit, read_facts, require_torch
from ..environments.plan import RunOptions, choose_rows
from ..environments.venv import cpu_interpreter
from ..errors import NoEnvironment, NothingSelected, WrongArguments
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen, Result
from ..process import Processes
from .fp8 import find_refused_run

ArmName = Literal["off", "on"]
ARMS: Final[tuple[ArmName, ArmName]] = ("off", "on")


class Verdict(StrEnum):
    """What a feature does to the time of a step."""

    WIN = "win"  # the interval is below 1
    TAX = "tax"  # the interval is above 1
    NO_EFFECT = "no-effect"  # the interval is within `LEAST` of 1
    UNDECIDED = "undecided"  # the budget ended before the interval decided
    NOT_JUDGED = "not-judged"  # no evidence


class ArmSeen(Frozen):
    """One arm, as its process reports it.

    Attributes:
        changes: numbers of the size, as they were trained; all of them.
        features, forms: those that it had.
        parts: name of a part -> the backend that was observed.
        loss: of its last step, nats a prediction.
        peak_bytes: most GPU memory that the arm held in its first steps; 0 where it was not measured.
    """

    changes: dict[str, JsonValue] = Field(default_factory=dict)
    features: dict[str, JsonValue] = Field(default_factory=dict)
    forms: dict[str, JsonValue] = Field(default_factory=dict)
    parts: dict[str, str] = Field(default_factory=dict)
    loss: float
    peak_bytes: int = 0


class FeatureAblation(Result):
    """The receipt of one feature.

    Attributes:
        tool, commit: that ran it.
        feature, title, plain: as the row says.
        off, on: whole orders of the two arms.
        arms: both as they were seen; empty where the process reported none.
        steps: of a block.
        pairs: median seconds of a step in each block, without the feature and with it, in the order of time.
        ratio, low, high: of the step time, on over off, with the interval of the last look; 0 where no pair was run.
        verdict: of the interval.
        reasons: why it was not judged; empty where it was.
    """

    schema_id: Literal["megacpp-validate/feature-ablation/3"] = "megacpp-validate/feature-ablation/3"
    commit: str = ""
    feature: str
    title: str
    plain: str
    off: dict[str, JsonValue]
    on: dict[str, JsonValue]
    arms: dict[ArmName, ArmSeen] = Field(default_factory=dict)
    steps: int = 0
    pairs: tuple[tuple[float, float], ...] = ()
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    verdict: Verdict = Verdict.NOT_JUDGED
    reasons: tuple[str, ...] = ()


class AblationResult(Result):
    """What a call of the verb showed, feature by feature."""

    schema_id: Literal["megacpp-validate/ablation/3"] = "megacpp-validate/ablation/3"
    features: tuple[FeatureAblation, ...]

    @property
    def lacks(self) -> bool:
        """Whether a feature is undecided or not judged, or none was selected; a tax closes nothing."""
        decided = (Verdict.WIN, Verdict.TAX, Verdict.NO_EFFECT)
        return not self.features or any(row.verdict not in decided for row in self.features)


LEAST: Final = math.log(1.05)  # effect that must be seen
ALPHA: Final = 0.001  # chance that a feature without an effect is ever called a win or a tax
FIRST_LOOK: Final = 4  # pairs


def judge_pairs(pairs: Sequence[tuple[float, float]]) -> tuple[Verdict, float, float, float]:
    """Verdict, and the ratio on / off with its interval.

    Args:
        pairs: positive seconds (off, on); an even number, `FIRST_LOOK` or more.
    """
    logs = [math.log(on / off) for off, on in pairs]
    mean = statistics.fmean(logs)
    half = critical_t(len(pairs)) * statistics.stdev(logs) / math.sqrt(len(pairs))
    verdict = Verdict.UNDECIDED
    if abs(mean) > half:
        verdict = Verdict.WIN if mean < 0 else Verdict.TAX
    elif abs(mean) + half < LEAST:
        verdict = Verdict.NO_EFFECT
    return verdict, math.exp(mean), math.exp(mean - half), math.exp(mean + half)


@cache
def critical_t(pairs: int) -> float:
    """Student's t, two-sided, of the look after so many pairs; the degrees of freedom are odd.

    By bisection of the distribution, which is a finite sum for odd degrees (Abramowitz and Stegun, 26.7.3).
    """
    look = (pairs - FIRST_LOOK) // 2 + 1
    inside, freedom = 1 - ALPHA / (look * (look + 1)), pairs - 1
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        term, total = math.cos(angle), 0.0
        for power in range(3, freedom + 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (power - 1) / power
        covered = 2 / math.pi * (angle + math.sin(angle) * total)
        low, high = (angle, high) if covered < inside else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def find_arm_faults(arm: Arm, order: Mapping[str, Any], seen: ArmSeen) -> Iterator[str]:
    """Why what ran is no evidence of an arm.

    Args:
        arm: of the row, with the backends that its parts must have been seen on.
        order: that the arm was given, whole.
        seen: what ran.
    """
    for kind in ("changes", "features", "forms"):
        held = getattr(seen, kind)
        for name, wanted in order.get(kind, {}).items():
            if _plain(held.get(name)) != _plain(wanted):
                got = _plain(held.get(name, "nothing"))
                yield f"{kind}.{name} was requested as {_plain(wanted)}, and the run reports {got}"
    for pattern, backends in arm.parts.items():
        found = {name: backend for name, backend in seen.parts.items() if fnmatchcase(name, pattern)}
        if not found:
            yield f"no part {pattern} was seen, which must be on {' or '.join(backends)}"
        wrong = {name: backend for name, backend in found.items() if backend not in backends}
        yield from (
            f"{name} ran on {backend}, and must be on {' or '.join(backends)}" for name, backend in wrong.items()
        )


def _plain(value: Any) -> str:
    """A value in one form, whether a run reports it as JSON or as words."""
    return " ".join(re.findall(r"[\w.-]+", str(value))).lower()


def decide_feature(
    feature: Feature, orders: Mapping[ArmName, Mapping[str, Any]], answer: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of `FeatureAblation` from what its process answered.

    Args:
        feature: its row.
        orders: of both arms, whole.
        answer: `fault`, in words; or `pairs`, `steps`, and the receipt of each arm in `arms`.
    """
    if fault := answer.get("fault"):
        return {"reasons": (fault,)}
    arms = {arm: _read_arm(answer["arms"][arm]) for arm in ARMS}
    pairs = tuple((off, on) for off, on in answer["pairs"])
    verdict, ratio, low, high = judge_pairs(pairs)
    found = {"arms": arms, "pairs": pairs, "steps": answer["steps"]}
    rows: dict[ArmName, Arm] = {"off": feature.off, "on": feature.on}
    faults = tuple(
        f"{arm}: {fault}" for arm, seen in arms.items() for fault in find_arm_faults(rows[arm], orders[arm], seen)
    )
    if faults:
        return {**found, "reasons": faults}
    return {**found, "verdict": verdict, "ratio": ratio, "low": low, "high": high}


def _read_arm(receipt: Mapping[str, Any]) -> ArmSeen:
    """What is read of the receipt of an arm's rank, which has more."""
    return ArmSeen(
        changes=receipt["model"]["size"], features=receipt["features"], forms=receipt["forms"],
        parts={name: part["observed"] for name, part in receipt["choices"].items()},
        loss=receipt["steps"][-1]["loss"], peak_bytes=receipt["peak_bytes"],
    )  # fmt: skip


# --- Running both arms. ---

MODULE: Final = "megacpp_validate.training.smoke"
# On a GPU as wide as `scaled`, 32,768 tokens a step, so that the GPU sets the pace: medians of equal runs of `small`
# differed by up to 28% (H200, 2026-11-22), and equal steps of 8,192 tokens by 10% (2026-11-28): the GPU waited for the
# host.
SIZES: Final = {"cuda": "single", "cpu": "tiny"}
# Low, and reached late: at 3e-3 from the first step on, two arms that differed by roundings left the plateau of their
# first losses ten steps apart (H200, 2026-11-22), and a feature seemed to change the loss by 1 nat.
LEARNING_RATE: Final = 3e-4
_SCHEDULED: Final = 2000  # steps: more than a budget of pairs takes
_GRACE_S: Final = 60.0  # to start up, and to end the pairs that run when the budget ends


@dataclass(frozen=True)
class AblationOptions(RunOptions):
    """What the user gave; `limit_s` is the budget of seconds of all features together.

    Attributes:
        features: in the order in which they are run.
        pairs: at most, of each feature.
    """

    features: tuple[Feature, ...]
    pairs: int
    device: Literal["cuda", "cpu"]


def choose_features(words: Sequence[str], posture: Posture) -> tuple[Feature, ...]:
    """Rows from what was typed: `feature=recompute,mtp`, the same without `feature=`, or all.

    Raises:
        WrongArguments: a feature has no row.
        NothingSelected: no feature is named.
    """
    typed = [name for word in words for name in word.removeprefix("feature=").split(",") if name]
    if not typed:
        raise NothingSelected("no feature is selected. Next step: name one, as in feature=recompute, or all.")
    return choose_rows("feature", posture.features, () if "all" in typed else typed)


def plan_arms(posture: Posture, feature: Feature, options: AblationOptions) -> dict[ArmName, dict[str, Any]]:
    """The whole order of each arm; they differ in the feature and in nothing else.

    Both begin with the posture, and nobody looking on; on a CPU with everything in its plain form.
    """
    plain = options.device == "cpu"
    switches = dict.fromkeys(posture.switches if plain else posture.observability, False)  # who looks on costs time
    order: dict[str, Any] = {
        "size": SIZES[options.device], "changes": {}, "plan": {"data": 1}, "steps": _SCHEDULED,
        "seed": options.seed, "precision": "fp32" if plain else "bf16", "device": options.device,
        "target": options.target, "features": {}, "forms": {}, "learning_rate": LEARNING_RATE,
        "warm_up": _SCHEDULED // 2,
    }  # fmt: skip
    order = merge_orders(order, settings_of(posture, switches))
    order = merge_orders(order, feature.both.as_order)
    return {"off": merge_orders(order, feature.off.as_order), "on": merge_orders(order, feature.on.as_order)}


def run_ablation(
    posture: Posture, policy: Fp8Policy, options: AblationOptions, report: Callable[[str], None]
) -> AblationResult:
    """Run the features, as many as the budget allows, and write the receipt of each.

    All run in one process, which pays once for imports and for what is compiled. Where the process ends early, the
    feature at hand is not judged, and those after it run in another process.

    Args:
        policy: of low precision; arms whose preset it refuses do not start.
        report: called with a line for each feature.

    Raises:
        WrongArguments: the policy refuses an arm; nothing was started.
        NoEnvironment: there is no interpreter with torch, or no GPU to train on.
        ToolError: another run writes to the folder of the receipts.
        OSError: the receipts cannot be written.
    """
    find = cpu_interpreter if options.device == "cpu" else host_interpreter
    environment = find(os.environ, options.python)
    features = {feature.id: feature for feature in options.features}
    orders = {name: plan_arms(posture, feature, options) for name, feature in features.items()}
    for name, arms in orders.items():
        for order in arms.values():
            changes = " ".join(f"{key}={value}" for key, value in order["changes"].items())
            preset = order["features"].get("preset", "production")
            if reason := find_refused_run(policy, preset, order["precision"], changes):
                raise WrongArguments(f"{name} does not start: {reason}")
    facts = read_facts(environment, Processes())
    require_torch(facts)
    if options.device == "cuda" and facts.gpu is None:
        raise NoEnvironment(
            f"this machine has no GPU: {facts.why_no_gpu}. Next step: run it on a GPU host, or give --device cpu."
        )
    rows = []
    with own_folder(options.receipts):
        for name, answer in _run_in_turn(environment, orders, options):
            row = FeatureAblation(
                commit=read_commit(), feature=name, title=features[name].title, plain=features[name].plain,
                off=orders[name]["off"], on=orders[name]["on"], **decide_feature(features[name], orders[name], answer),
            )  # fmt: skip
            write_whole(options.receipts / f"{name}.json", row.model_dump_json(indent=2) + "\n")
            rows.append(row)
            report(f"{row.verdict.value:12} {name} ({len(row.pairs)} pairs)")
    return AblationResult(features=tuple(rows))


def _run_in_turn(
    environment: InterpreterEnvironment, orders: Mapping[str, Any], options: AblationOptions
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Feature and what its process answered, or the words of its fault."""
    ends, processes, waiting = time.monotonic() + options.limit_s, Processes(), list(orders)
    looks = {pairs: critical_t(pairs) for pairs in range(FIRST_LOOK, max(options.pairs, FIRST_LOOK) + 1, 2)}
    while waiting:
        left = max(0.0, ends - time.monotonic())
        home = options.receipts.absolute() / f"from-{waiting[0]}"
        home.mkdir(parents=True, exist_ok=True)
        given = {"arms": {name: orders[name] for name in waiting}, "folder": str(home), "seconds": left}
        given |= {"device": options.device, "looks": looks, "least": LEAST}
        write_whole(home / "order.json", json.dumps(given))
        ended = processes.run(
            environment.call(MODULE), folder=home, limit_s=left + _GRACE_S, log=home / "log", given=home / "order.json"
        )
        while waiting and (answer := home / f"{waiting[0]}.json").is_file():
            yield waiting.pop(0), json.loads(answer.read_text())
        if ended.code == 0:
            fault = f"the budget of {options.limit_s:g} s ended. Next step: run the feature alone, or raise --limit"
            yield from ((name, {"fault": fault}) for name in waiting)
            return
        if waiting:
            yield waiting.pop(0), {"fault": f"its process ended by {ended.how} {ended.code}: {ended.last_words}"}
