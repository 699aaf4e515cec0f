"""Who answers a search: the interface, and the loop that asks, keeps the answers, and tells the result."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..bisect_result import Answer, Axis, BisectResult, PointResult, Verdict
from .answers import Answers
from .bound import least_runs
from .repeats import Trust
from .search import PATIENCE, Conclusion, Point, find_contradictions, name_point, search


class NotBuilt(RuntimeError):
    """There is no environment for a point; the text says what happened, the likely cause and the next step."""


class Judge(Protocol):
    """Says what one point is."""

    def identify(self, choices: Mapping[str, str]) -> str:
        """A hash of everything that decides what this point gives but the tool; makes the environment ready.

        Args:
            choices: a value an axis.

        Raises:
            NotBuilt: it cannot be made ready.
        """

    def judge(self, choices: Mapping[str, str], run: int) -> Answer:
        """What the point is; called after `identify`.

        Args:
            choices: a value an axis.
            run: 0 for the first run at this point, and so on.

        Raises:
            NotBuilt: that shows only now.
        """


Progress = Callable[[Mapping[str, str], Answer, bool], None]
"""Called with a point, what it gave, and whether that was known from an earlier search."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        tool, tier: for the result.
        module: id of the bridge module.
        axes: from the good end to the bad end.
        trust: in a single run.
        patience: values of one axis that could not be told, before the search ends with a range.
    """

    tool: str
    tier: str
    module: str
    axes: tuple[Axis, ...]
    trust: Trust = field(default_factory=Trust)
    patience: int = PATIENCE


def run_search(
    question: Question, judge: Judge, answers: Answers, progress: Progress = lambda *_: None
) -> BisectResult:
    """Ask until the search is over; what was answered before is taken from `answers`.

    Raises:
        OSError: an answer cannot be kept.
        ValueError: no axis moves, or too many do.
    """
    started = time.monotonic()
    runs: Counter[Point] = Counter()
    reused: Counter[Point] = Counter()
    identities: dict[Point, str] = {}
    steps = search(question.axes, question.trust, question.patience)
    try:
        point = next(steps)
        while True:
            choices = _choose(question.axes, point)
            try:
                if point not in identities:
                    identities[point] = judge.identify(choices)
                answer = answers.find(choices, identities[point], runs[point])
                known = answer is not None
                if answer is None:
                    answer = judge.judge(choices, runs[point])
                    answers.keep(choices, identities[point], runs[point], answer)
            except NotBuilt as fault:
                answer, known = Answer(verdict=Verdict.CANNOT_BUILD, reason=str(fault), lasting=False), False
            progress(choices, answer, known)
            runs[point] += 1
            reused[point] += known
            point = steps.send(answer)
    except StopIteration as ended:
        return _tell(question, ended.value, answers, runs, reused, time.monotonic() - started)


def _tell(
    question: Question,
    found: Conclusion,
    answers: Answers,
    runs: Counter[Point],
    reused: Counter[Point],
    seconds: float,
) -> BisectResult:
    by_name = {name_point(question.axes, point): point for point in runs}
    points = tuple(p.model_copy(update={"reused": reused[by_name[p.choices]]}) for p in found.points)
    verdicts = _recall(question.axes, answers) | {by_name[p.choices]: p.verdict for p in points}
    sizes = [len(axis.values) - len(axis.absent) for axis in question.axes if len(axis.values) > 1]
    together = max((len(culprit.axes) for culprit in found.culprits), default=1)
    return BisectResult(
        tool=question.tool,
        module=question.module,
        tier=question.tier,
        axes=question.axes,
        end=found.end,
        culprits=found.culprits,
        innocent=found.innocent,
        points=points,
        contradictions=find_contradictions(question.axes, verdicts),
        flaky=question.trust.flaky,
        error=question.trust.error if question.trust.flaky else 0.0,
        confidence=found.confidence,
        unlike_stated=found.unlike_stated,
        environments=sum(p.verdict is not Verdict.CANNOT_BUILD for p in points),
        runs=sum(_count_runs(p, runs[by_name[p.choices]]) for p in points),
        best=math.ceil(least_runs(sizes, question.trust, together) - 1e-9),
        seconds=round(seconds, 1),
    )


def _count_runs(point: PointResult, asked: int) -> int:
    return asked - (point.verdict is Verdict.CANNOT_BUILD)  # where nothing was built nothing was run


def _recall(axes: Sequence[Axis], answers: Answers) -> dict[Point, Verdict]:
    """Verdicts that lie in the folder, of points of this search that it did not ask for; only to see contradictions."""
    found: dict[Point, Verdict] = {}
    for choices, verdict in answers.recall():
        if set(choices) == {axis.name for axis in axes} and all(choices[a.name] in a.values for a in axes):
            found[tuple(axis.values.index(choices[axis.name]) for axis in axes)] = verdict
    return found


def _choose(axes: Sequence[Axis], point: Point) -> dict[str, str]:
    return dict(zip((axis.name for axis in axes), name_point(axes, point), strict=True))
