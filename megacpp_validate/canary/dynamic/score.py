"""The suite's own score as it is shown to people: rates with their intervals, their day, and the file they are of."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ...evidence.selftest import SelftestResult, wilson_interval
from ...evidence.values import Frozen
from .blame_score import BlameScore


class Rate(Frozen):
    """How often something happened.

    Attributes:
        id: short and stable.
        says: of what it is a rate, in a sentence.
        good: which end is the good one.
        low, high: 95% Wilson interval.
        day: ISO 8601; empty where nobody knows.
        day_of: of the run itself, or of the commit that its file came with, which is the latest that it can be.
        source: file of the evidence, relative to the checkout.
    """

    id: str
    says: str
    good: Literal["high", "low"]
    hits: int = Field(ge=0)
    trials: int = Field(ge=0)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)
    day: str
    day_of: Literal["run", "commit"]
    source: str

    @model_validator(mode="after")
    def _interval_is_of_the_counts(self) -> Rate:
        if (self.low, self.high) != wilson_interval(self.hits, self.trials):
            raise ValueError(
                f"{self.id}: {self.low} to {self.high} is not the interval of {self.hits} of {self.trials}"
            )
        return self


class SuiteScore(Frozen):
    """Every rate, and what gave no evidence."""

    schema_id: Literal["megacpp-validate/score/1"] = "megacpp-validate/score/1"
    rates: tuple[Rate, ...]
    lost: tuple[str, ...] = ()


class Evidence(Frozen):
    """A file of evidence: where it lies, and the day of the commit that it came with."""

    source: str
    committed: str = ""


def score_selftest(result: SelftestResult, of: Evidence) -> tuple[Rate, ...]:
    """Kill rate, blame accuracy and false-alarm rate of one full run of the selftest."""
    planted = f"faults planted in the wrappers and in what Transformer Engine returns ({len(result.modules)} modules)"
    rows: tuple[tuple[str, str, Literal["high", "low"], int, int], ...] = (
        ("kill-rate", f"{planted} that turn a probe red", "high", result.killed, len(result.mutants)),
        ("blame-accuracy", "of these, blamed on their own module", "high", result.blamed_rightly, result.killed),
        ("false-alarms", "probe runs without a fault, each with a fresh seed, that are red", "low",
         len(result.false_alarms), result.clean_runs),
    )  # fmt: skip
    day = result.finished_at[:10]
    return tuple(
        _rate(*row, day=day or of.committed, day_of="run" if day else "commit", source=of.source) for row in rows
    )


def score_blame(result: BlameScore, of: Evidence, *, held_out: bool) -> tuple[Rate, ...]:
    """How often the blame is right on faults in copies of a real Transformer Engine, and on copies without one."""
    kind = "held-out faults" if held_out else "faults"
    rates = [
        _rate(
            "te-blame-held-out" if held_out else "te-blame",
            f"{kind} in copies of Transformer Engine on {result.target}, named by module and class and nobody else",
            "high", result.right, len(result.judged), day=of.committed, day_of="commit", source=of.source,
        )
    ]  # fmt: skip
    if result.seen_controls:
        rates.append(
            _rate(
                "te-false-blame", f"pairs of clean copies on {result.target} of which somebody is blamed", "low",
                result.false_blames, len(result.seen_controls), day=of.committed, day_of="commit", source=of.source,
            )
        )  # fmt: skip
    return tuple(rates)


def _rate(
    name: str, says: str, good: Literal["high", "low"], hits: int, trials: int,
    *, day: str, day_of: Literal["run", "commit"], source: str,
) -> Rate:  # fmt: skip
    low, high = wilson_interval(hits, trials)
    return Rate(
        id=name,
        says=says,
        good=good,
        hits=hits,
        trials=trials,
        low=low,
        high=high,
        day=day,
        day_of=day_of,
        source=source,
    )
