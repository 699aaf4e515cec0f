"""The search for the first bad point on the way from a good stack to a bad one.

Each component that changes is an axis. The way moves one axis after another from its good value to its bad one, so that
all points lie on one line, and the search halves that line. A fault is assumed to stay once it has appeared. A point
that gives no answer is left out, and widens the range.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from enum import StrEnum
from itertools import pairwise
from typing import Final, Literal

from pydantic import Field

from ... import TOOL
from ...errors import Exit, NoEnvironment
from ...evidence.values import Frozen

TE: Final = "te"  # the axis that every search has
NOT_HERE: Final = "this host has no environment for it"


class Verdict(StrEnum):
    """What one point of the search is. Only the first two say anything about the module."""

    GOOD = "good"
    BAD = "bad"
    CANNOT_BUILD = "cannot-build"  # there is no such environment, or it could not be made
    CANNOT_TELL = "cannot-tell"  # something else than the module failed


class Axis(Frozen):
    """One component that changes between the good and the bad end.

    Attributes:
        name: "te", "cudnn", "torch", ...
        values: from the good end to the bad end.
        absent: values without an environment on this host; they are never tried.
    """

    name: str
    values: tuple[str, ...] = Field(min_length=1)
    absent: tuple[str, ...] = ()


class Answer(Frozen):
    """The result of one run at one point; `reason` is what failed, what blocks the module, or why nothing was built."""

    verdict: Verdict
    reason: str = ""


class PointResult(Answer):
    """One point: a value an axis, in the order of the axes; `runs` counts the runs that were started there."""

    choices: tuple[str, ...]
    runs: int = 0


class Turn(Frozen):
    """Where along one axis good turns into bad.

    Attributes:
        held: the values of the other axes meanwhile.
        last_good: empty where the range begins on an earlier axis.
        first_bad: the first bad value; several where those before the last gave no answer: it is one of them.
        untold: of those values, why each gave no answer.
    """

    axis: str
    held: dict[str, str] = Field(default_factory=dict)
    last_good: str = ""
    first_bad: tuple[str, ...]
    untold: dict[str, str] = Field(default_factory=dict)


class SearchEnd(StrEnum):
    """How a search ended."""

    FOUND = "found"
    NARROWED = "narrowed"  # to a range: the points inside gave no answer
    GOOD_IS_BAD = "good-is-bad"
    BAD_IS_GOOD = "bad-is-good"
    END_UNTOLD = "end-untold"  # one of the end points gave no answer
    END_UNBUILT = "end-unbuilt"  # one of the end points cannot be built


_EXITS: Final = {
    SearchEnd.FOUND: Exit.CLOSED,
    SearchEnd.GOOD_IS_BAD: Exit.WRONG_ARGUMENTS,
    SearchEnd.BAD_IS_GOOD: Exit.WRONG_ARGUMENTS,
    SearchEnd.END_UNBUILT: Exit.NO_ENVIRONMENT,
}


class BisectResult(Frozen):
    """The answer of a search.

    Attributes:
        module: is good at one end and bad at the other.
        tier: "static" or "gpu": what judged each point.
        axes: all of them, also those that do not change.
        culprits: where good turns into bad: one axis, or several where the range covers the end of one and the
            beginning of the next.
        innocent: axes that change; the module is bad without the change of any of them.
        points: in the order in which they were tried.
    """

    schema_id: Literal["megacpp-validate/bisect/3"] = "megacpp-validate/bisect/3"
    tool: str
    module: str
    tier: str
    axes: tuple[Axis, ...]
    end: SearchEnd
    culprits: tuple[Turn, ...] = ()
    innocent: tuple[str, ...] = ()
    points: tuple[PointResult, ...] = ()
    seconds: float = 0.0

    @property
    def exit(self) -> Exit:
        """Closed where the first bad point is known; evidence is missing where only a range is."""
        return _EXITS.get(self.end, Exit.EVIDENCE_MISSING)


Point = tuple[str, ...]
"""A value an axis."""
Probe = Callable[[Mapping[str, str], int], Answer]
"""Judges a point, a value an axis, in its run 0, 1, ...; raises `NoEnvironment` where nothing can be built there."""
Progress = Callable[[Mapping[str, str], Answer], None]
"""Called with a point and its answer after each run."""


def search(
    axes: Sequence[Axis], probe: Probe, *, module: str, tier: str, repeat: int = 1,
    progress: Progress = lambda *_: None,
) -> BisectResult:  # fmt: skip
    """Search from the first values of all axes, which are good, to the last, which are bad.

    Args:
        axes: in the order in which they are moved.
        probe: judges a point.
        repeat: runs of a point; one bad run makes the point bad.
    """
    started = time.monotonic()
    names = [axis.name for axis in axes]
    seen: dict[Point, PointResult] = {}

    def judge(point: Point) -> Verdict:
        choices = dict(zip(names, point, strict=True))
        for run in range(0 if point in seen else repeat):
            try:
                answer = probe(choices, run)
            except NoEnvironment as fault:
                answer = Answer(verdict=Verdict.CANNOT_BUILD, reason=str(fault))
            progress(choices, answer)
            runs = run + (answer.verdict is not Verdict.CANNOT_BUILD)
            seen[point] = PointResult(choices=point, verdict=answer.verdict, reason=answer.reason, runs=runs)
            if answer.verdict is not Verdict.GOOD:
                break
        return seen[point].verdict

    points = [tuple(axis.values[0] for axis in axes)]
    for number, axis in enumerate(axes):
        points += [(*points[-1][:number], value, *points[-1][number + 1 :]) for value in axis.values[1:]]
    turns: list[Turn] = []
    innocent: tuple[str, ...] = ()
    end = _confirm_ends(points, judge)
    if end is None:
        good, bad = _halve(points, {(axis.name, value) for axis in axes for value in axis.absent}, names, judge)
        end = SearchEnd.FOUND if bad == good + 1 else SearchEnd.NARROWED
        turns = _find_turns(points[good : bad + 1], names, seen)
        alone = tuple(turns[0].first_bad[0] if axis.name == turns[0].axis else axis.values[0] for axis in axes)
        others = [axis.name for axis in axes if len(axis.values) > 1 and axis.name != turns[0].axis]
        if end is SearchEnd.FOUND and others and judge(alone) is Verdict.BAD:
            innocent = tuple(others)
    return BisectResult(
        tool=TOOL, module=module, tier=tier, axes=tuple(axes), end=end, culprits=tuple(turns), innocent=innocent,
        points=tuple(seen.values()), seconds=round(time.monotonic() - started, 1),
    )  # fmt: skip


def _confirm_ends(points: Sequence[Point], judge: Callable[[Point], Verdict]) -> SearchEnd | None:
    """How the search ends because an end is not what it should be; None where both are."""
    for point, verdict, end in (
        (points[0], Verdict.GOOD, SearchEnd.GOOD_IS_BAD),
        (points[-1], Verdict.BAD, SearchEnd.BAD_IS_GOOD),
    ):
        found = judge(point)
        if found is not verdict:
            return {Verdict.CANNOT_BUILD: SearchEnd.END_UNBUILT, Verdict.CANNOT_TELL: SearchEnd.END_UNTOLD}.get(
                found, end
            )
    return None


def _halve(
    points: Sequence[Point], absent: Set[tuple[str, str]], names: Sequence[str],
    judge: Callable[[Point], Verdict],
) -> tuple[int, int]:  # fmt: skip
    """Indices of the last good and of the first bad point; those between them gave no answer."""
    good, bad = 0, len(points) - 1
    skipped = {at for at, point in enumerate(points) if not absent.isdisjoint(zip(names, point, strict=True))}
    while left := [at for at in range(good + 1, bad) if at not in skipped]:
        middle = min(left, key=lambda at: abs(2 * at - good - bad))
        match judge(points[middle]):
            case Verdict.GOOD:
                good = middle
            case Verdict.BAD:
                bad = middle
            case _:
                skipped.add(middle)
    return good, bad


def _find_turns(points: Sequence[Point], names: Sequence[str], seen: Mapping[Point, PointResult]) -> list[Turn]:
    """The range from the last good point to the first bad one, by axis."""
    turns: list[Turn] = []
    for number, name in enumerate(names):
        moved = [point for before, point in pairwise(points) if point[number] != before[number]]
        if moved:
            turns.append(
                Turn(
                    axis=name,
                    held={other: value for other, value in zip(names, moved[-1], strict=True) if other != name},
                    last_good="" if turns else points[0][number],
                    first_bad=tuple(point[number] for point in moved),
                    untold={
                        point[number]: seen[point].reason if point in seen else NOT_HERE
                        for point in moved
                        if point != points[-1]
                    },
                )
            )
    return turns
