"""The score of the blame in words and cells, for every form that tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from megacpp_validate.evidence.selftest import wilson_interval

from ...canary.dynamic.blame_score import BlameScore, ControlResult, FaultResult, Verdict
from ...canary.dynamic.upgrade_result import Culprit

HEADINGS: Final = ("faults", "right module", "right class", "nobody else", "right", "95% Wilson")
_WORDS: Final[dict[Verdict, str]] = {
    Verdict.RIGHT: "right",
    Verdict.WRONG_MODULE: "another module is named",
    Verdict.WRONG_CAUSE: "the module is right, and its class is not",
    Verdict.OTHERS_TOO: "the module is right, and others are named too",
    Verdict.MISSED: "nobody is named",
    Verdict.NOT_PLANTED: "not planted",
    Verdict.NOT_RUN: "not run",
}


class ModuleScore(NamedTuple):
    """What the blame made of the faults of one module; only those with evidence count."""

    module: str
    faults: int
    named: int
    named_with_cause: int
    named_alone: int
    right: int
    bound: float

    @property
    def cells(self) -> tuple[str, ...]:
        """What stands under `HEADINGS`."""
        counts = (self.faults, self.named, self.named_with_cause, self.named_alone, self.right)
        return (*map(str, counts), f">= {self.bound:.0%}" if self.faults else "")

    @property
    def is_whole(self) -> bool:
        """Whether every fault of it is right."""
        return self.right == self.faults


def score_modules(score: BlameScore) -> Iterator[ModuleScore]:
    """A row a module in dependency order, and one of all."""
    for module in score.modules:
        yield _score(module, [row for row in score.judged if row.module == module])
    yield _score("all", list(score.judged))


def _score(name: str, rows: list[FaultResult]) -> ModuleScore:
    right = sum(row.verdict is Verdict.RIGHT for row in rows)
    return ModuleScore(
        name,
        len(rows),
        named=sum(row.names_module for row in rows),
        named_with_cause=sum(_has_cause(row) for row in rows),
        named_alone=sum(row.verdict in (Verdict.RIGHT, Verdict.WRONG_CAUSE) for row in rows),
        right=right,
        bound=wilson_interval(right, len(rows))[0],
    )


def _has_cause(row: FaultResult) -> bool:
    """Whether its module is named with the class that it has."""
    if row.verdict is Verdict.RIGHT:
        return True
    return row.names_module and any(
        culprit.module == row.module and culprit.cause is row.cause for culprit in row.culprits
    )


def find_unsettled(score: BlameScore) -> list[FaultResult]:
    """Faults that are not right, those without evidence among them."""
    return [row for row in score.faults if row.verdict is not Verdict.RIGHT]


def find_loud(score: BlameScore) -> list[ControlResult]:
    """Controls for which somebody is named, or without evidence."""
    return [row for row in score.controls if row.culprits or row.reason]


def say_right(score: BlameScore) -> str:
    """The score in a sentence."""
    judged = len(score.judged)
    if not judged:
        return f"No fault was judged: {score.environment.rstrip('.')}."
    return (
        f"Blame: {score.right} of {judged} faults planted in Transformer Engine are named by module and class, "
        f"and nobody else is ({score.right / judged:.1%}; 95% Wilson lower bound {score.right_bound:.1%})."
    )


def say_controls(score: BlameScore) -> str:
    """What clean pairs gave, in a sentence."""
    seen = len(score.seen_controls)
    if not seen:
        return "No clean pair was compared."
    timed = sum(row.timed for row in score.seen_controls)
    return (
        f"Clean pairs: {score.false_blames} of {seen} name somebody ({timed} of them with speeds; 95% Wilson upper "
        f"bound {score.false_blame_bound:.1%})."
    )


def say_lacking(score: BlameScore) -> str:
    """What was asked for and did not run; empty where nothing is missing."""
    lacking = len(score.faults) - len(score.judged)
    return f"Not judged: {lacking} of {len(score.faults)} faults." if lacking and score.judged else ""


def say_verdict(row: FaultResult) -> str:
    """What became of a fault."""
    return f"{_WORDS[row.verdict]}: {row.reason}" if row.reason else _WORDS[row.verdict]


def say_culprits(culprits: tuple[Culprit, ...]) -> str:
    """Who was named, with what is filed under them."""
    said = []
    for one in culprits:
        cascades = f", and with it {', '.join(one.cascades)}" if one.cascades else ""
        said.append(f"{one.module} ({one.cause.value}){cascades}")
    return "; ".join(said)


def say_control(row: ControlResult) -> str:
    """What became of a clean pair that is not as it should be."""
    return f"names {say_culprits(row.culprits)}" if row.culprits else f"not run: {row.reason}"
