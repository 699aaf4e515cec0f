"""What matched pairs of runs showed of one feature: the runs as they were seen, what changed, a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, JsonValue, ValidationError

from ..evidence.strict_json import refuse_what_json_hides
from ..evidence.values import Frozen

ArmName = Literal["off", "on"]
ARMS: Final[tuple[ArmName, ArmName]] = ("off", "on")


class Verdict(StrEnum):
    """What a change is."""

    WIN = "win"  # better, by more than its own spread
    TAX = "tax"  # worse, by more than its own spread
    NOISE = "noise"  # within its spread
    NOT_JUDGED = "not-judged"  # no evidence


class AblationInvalid(ValueError):
    """A text that is no receipt of an ablation; its words say why."""


class PartSeen(Frozen):
    """What a part of the model was asked for and what it took."""

    requested: str
    observed: str


class RunSeen(Frozen):
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
    parts: dict[str, PartSeen] = Field(default_factory=dict)
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
    runs: tuple[RunSeen, ...] = ()
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


def parse_ablation(text: str | bytes, source: str = "the text") -> FeatureAblation:
    """A receipt from its JSON text.

    Raises:
        AblationInvalid: it is none, or contradicts itself.
    """
    try:
        read = FeatureAblation.model_validate_json(text)
        refuse_what_json_hides(text)
        faults = list(_find_contradictions(read))
    except ValidationError as fault:
        faults = [f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in fault.errors()[:5]]
    except ValueError as fault:
        faults = [str(fault)]
    if faults:
        raise AblationInvalid(
            f"{source} is no receipt of an ablation: {'; '.join(faults)}. Likely cause: it was edited, cut short, or "
            "written by another version. Next step: run the feature again."
        )
    return read


def read_ablation(path: Path) -> FeatureAblation:
    """A receipt from its file; raises `AblationInvalid`."""
    try:
        return parse_ablation(path.read_bytes(), str(path))
    except OSError as fault:
        raise AblationInvalid(f"{path} cannot be read: {fault.strerror or fault}") from fault


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
        yield from _find_false_verdict(name, getattr(read, name))


def _find_false_verdict(name: str, change: Any) -> Iterator[str]:
    if change is None:
        return
    if not change.low <= change.ratio <= change.high:
        yield f"{name}: {change.ratio:g} lies outside of its interval"
    if change.verdict is not Verdict.NOISE and change.low <= 1 <= change.high:
        yield f"{name}: a {change.verdict.value} whose interval holds 1"
