"""What a smoke run answers on its standard output, read back: one JSON object, the last line of it."""

from __future__ import annotations

import math
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from .ablation_result import ArmName, PartSeen, RunSeen

_OWN: Final = ("host", "place")  # of one rank, and no matter of what was compared


class AnswerInvalid(ValueError):
    """Words of a process that hold no answer; the text says why."""


class _Wire(BaseModel):
    """Receipts of ranks say more than is read here."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Step(_Wire):
    loss: float | str | None  # a number that is none comes as text
    seconds: float = Field(ge=0)


class _Part(_Wire):
    requested: str
    observed: str


class _Model(_Wire):
    name: str
    pattern: str
    parameters: int
    size: dict[str, JsonValue]


class _Goodput(_Wire):
    tokens: int
    peak_bytes: dict[str, int]


class _Rank(_Wire):
    rank: int
    steps: list[_Step]
    goodput: _Goodput
    choices: dict[str, _Part]
    topology: dict[str, JsonValue]
    forms: dict[str, JsonValue]
    features: dict[str, JsonValue]
    model: _Model
    versions: dict[str, JsonValue]


class SmokeAnswer(_Wire):
    """The end of a run, and the receipts of its ranks."""

    ending: str
    words: str = ""
    seconds: float = 0.0
    ranks: list[_Rank]


def parse_answer(words: str) -> SmokeAnswer:
    """The answer among the words of a process: the last line that is one; libraries may say something after it.

    Raises:
        AnswerInvalid: there is none, or it lacks what every receipt of a rank has.
    """
    for line in reversed(words.splitlines()):
        if line.startswith("{") and '"ending"' in line:
            try:
                return SmokeAnswer.model_validate_json(line)
            except ValidationError as fault:
                said = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in fault.errors()[:3]]
                raise AnswerInvalid(f"its answer has another form: {'; '.join(said)}") from fault
    raise AnswerInvalid("it gave no answer")


def see_run(answer: SmokeAnswer, arm: ArmName, place: int, file: str = "") -> RunSeen:
    """A run in one row: a step takes as long as on its slowest rank, and the rank that uses most memory counts."""
    ended: dict[str, Any] = {
        "arm": arm, "place": place, "ending": answer.ending, "words": answer.words, "seconds": answer.seconds,
        "file": file,
    }  # fmt: skip
    if not answer.ranks:
        return RunSeen(**ended)
    first = min(answer.ranks, key=lambda rank: rank.rank)
    times = zip(*([step.seconds for step in rank.steps] for rank in answer.ranks), strict=False)
    return RunSeen(
        **ended,
        model=first.model.name,
        pattern=first.model.pattern,
        parameters=first.model.parameters,
        topology={name: value for name, value in first.topology.items() if name not in _OWN},
        changes=first.model.size,
        features=first.features,
        forms=first.forms,
        parts={
            name: PartSeen(requested=part.requested, observed=part.observed)
            for name, part in _merge_parts(answer.ranks).items()
        },
        step_seconds=tuple(max(row) for row in times),
        losses=tuple(_finite(step.loss) for step in first.steps),
        tokens=first.goodput.tokens // len(first.steps) if first.steps else 0,
        peak_bytes=max(max(rank.goodput.peak_bytes.values(), default=0) for rank in answer.ranks),
        versions=first.versions,
    )


def _merge_parts(ranks: list[_Rank]) -> dict[str, _Part]:
    """Parts of rank 0; where another rank took something else, that stands under the rank's own name."""
    first = min(ranks, key=lambda rank: rank.rank)
    parts = dict(first.choices)
    for rank in ranks:
        for name, part in rank.choices.items():
            if part != first.choices.get(name):
                parts[f"{name}@{rank.rank}"] = part
    return parts


def _finite(loss: float | str | None) -> float | None:
    return loss if isinstance(loss, float) and math.isfinite(loss) else None
