"""The search for the first bad point: both ends, then which axes, then where along each, one after another.

Several axes change between the ends. Each is moved to the bad end alone: one that is bad by itself is a culprit. Where
none is, all are moved, and put back one by one: those that cannot be put back are bad together. Along an axis the
search halves the range. What is bad is taken to stay bad further on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, Protocol

from pydantic import Field, ValidationError

from ...errors import Exit
from ...evidence.values import Frozen
from ...evidence.whole_file import write_whole

TE: Final = "te"  # the axis that every search has


class Verdict(StrEnum):
    """What one point of the search is. Only the first two say anything about the module."""

    GOOD = "good"
    BAD = "bad"
    CANNOT_BUILD = "cannot-build"  # there is no such environment, or it could not be made
    CANNOT_TELL = "cannot-tell"  # it was made, and something else than the module stands in the way

    @property
    def tells(self) -> bool:
        """Whether it says anything about the module."""
        return self in (Verdict.GOOD, Verdict.BAD)


class Axis(Frozen):
    """One component that changes between the good and the bad end.

    Attributes:
        name: "te", "cudnn", "torch", ...
        values: from the one of the good end to the one of the bad end.
        absent: of them, those that are known to exist and cannot be made usable here; they are never tried.
    """

    name: str
    values: tuple[str, ...] = Field(min_length=1)
    absent: tuple[str, ...] = ()


class Answer(Frozen):
    """What one run at one point gave.

    Attributes:
        reason: what failed, what blocks it, why there is no environment.
        lasting: whether the same point would give it again. A download that failed is tried anew at the next start.
    """

    verdict: Verdict
    reason: str = ""
    lasting: bool = True


class PointResult(Frozen):
    """One point: a value an axis, in the order of the axes.

    Attributes:
        reason: of the last run that gave `verdict`.
        good, bad: how many runs gave each; both above zero is flaky.
        reused: runs that an earlier search had made.
    """

    choices: tuple[str, ...]
    verdict: Verdict
    reason: str = ""
    good: int = 0
    bad: int = 0
    reused: int = 0


class Turn(Frozen):
    """Where along one axis good turns into bad.

    Attributes:
        held: what the other axes were held at.
        last_good: empty where not even the first value could be told.
        first_bad: the first bad value; several where what lies between could not be told: it is one of them.
        untold: of those values, why each could not be told.
        absent, untried: of those values, the ones without an environment here, and those left when patience ended.
    """

    axis: str
    held: dict[str, str] = Field(default_factory=dict)
    last_good: str = ""
    first_bad: tuple[str, ...]
    untold: dict[str, str] = Field(default_factory=dict)
    absent: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether the first bad value is known."""
        return len(self.first_bad) == 1 and bool(self.last_good)


class AxisCulprit(Frozen):
    """Axes that are bad together, most often one.

    Attributes:
        is_minimal: whether leaving any of them out was seen to be good.
        turns: one an axis.
    """

    axes: tuple[str, ...]
    is_minimal: bool
    turns: tuple[Turn, ...]


class SearchEnd(StrEnum):
    """How a search ended."""

    FOUND = "found"
    NARROWED = "narrowed"  # to a range, or to some of the axes: what would tell more could not be told
    GOOD_IS_BAD = "good-is-bad"
    BAD_IS_GOOD = "bad-is-good"
    END_UNTOLD = "end-untold"  # one of the end points cannot be told
    END_UNBUILT = "end-unbuilt"  # one of the end points cannot be built


_EXITS: Final = {
    SearchEnd.FOUND: Exit.CLOSED, SearchEnd.NARROWED: Exit.EVIDENCE_MISSING,
    SearchEnd.END_UNTOLD: Exit.EVIDENCE_MISSING, SearchEnd.GOOD_IS_BAD: Exit.WRONG_ARGUMENTS,
    SearchEnd.BAD_IS_GOOD: Exit.WRONG_ARGUMENTS,
    SearchEnd.END_UNBUILT: Exit.NO_ENVIRONMENT,
}  # fmt: skip


class BisectResult(Frozen):
    """The answer of a search.

    Attributes:
        module: that is good at one end and bad at the other.
        tier: what judged each point.
        axes: all that were given, the ones that do not change too.
        culprits: sets of axes that are bad; several where each alone is.
        innocent: axes that change and were seen to be good alone, where another axis explains the failure.
        points: every point that was tried, in that order.
        flaky: stated probability that one run is wrong; 0 without.
        confidence: that every verdict is right at that flakiness.
        runs: at all points; the ones of an earlier search too.
    """

    schema_id: Literal["megacpp-validate/bisect/2"] = "megacpp-validate/bisect/2"
    tool: str
    module: str
    tier: str
    axes: tuple[Axis, ...]
    end: SearchEnd
    culprits: tuple[AxisCulprit, ...] = ()
    innocent: tuple[str, ...] = ()
    points: tuple[PointResult, ...] = ()
    flaky: float = 0.0
    confidence: float = 1.0
    environments: int = 0
    runs: int = 0
    seconds: float = 0.0

    @property
    def exit(self) -> Exit:
        """A breakage that was found closes; one that was not pinned down lacks evidence."""
        return _EXITS[self.end]


Point = tuple[int, ...]
"""The index of a value on each axis."""
Progress = Callable[[Mapping[str, str], Answer, bool], None]
"""Called with a point, what it gave, and whether that was known from an earlier search."""


class NotBuilt(RuntimeError):
    """There is no environment for a point; the text says what happened, the likely cause and the next step."""


class Judge(Protocol):
    """Says what one point is, a value an axis."""

    def identify(self, choices: Mapping[str, str]) -> str:
        """A hash of what decides what this point gives; makes the environment ready, or raises `NotBuilt`."""

    def judge(self, choices: Mapping[str, str], run: int) -> Answer:
        """What the point is in its run 0, 1, ...; called after `identify`. May raise `NotBuilt`, too."""


@dataclass
class _Tally:
    """The runs of one point."""

    identity: str = ""
    good: int = 0
    bad: int = 0
    runs: int = 0
    reused: int = 0
    verdict: Verdict = Verdict.CANNOT_TELL
    reason: str = ""


@dataclass
class Search:
    """One search; `run` answers it.

    Attributes:
        question: what an answer depends on beside its point: tool, tier, module, target, seed. An answer to another
            question is none.
        axes: from the good end to the bad end.
        judge: says what a point is.
        answers: folder of answers; one that lies there is not asked for again.
        flaky: probability that one run is wrong, below 1/2; 0 makes every point one run.
        error: probability that the answer of the whole search may be wrong with, if flaky.
        patience: values of one axis that could not be told, before the search ends with a range.
        progress: called after each run.
    """

    question: Mapping[str, str]
    axes: tuple[Axis, ...]
    judge: Judge
    answers: Path
    flaky: float = 0.0
    error: float = 0.01
    patience: int = 8
    progress: Progress = lambda *_: None
    _seen: dict[Point, _Tally] = field(default_factory=dict)

    def run(self) -> BisectResult:
        """Search from the first values of all axes, which are good, to the last, which are bad.

        Raises:
            OSError: an answer cannot be kept.
        """
        started = time.monotonic()
        moving = [number for number, axis in enumerate(self.axes) if len(axis.values) > 1]
        end, culprits, innocent = self._search(moving)
        tallies = self._seen.values()
        return BisectResult(
            tool=self.question["tool"],
            module=self.question["module"],
            tier=self.question["tier"],
            axes=self.axes,
            end=end,
            culprits=tuple(culprits),
            innocent=innocent,
            points=tuple(
                PointResult(
                    choices=tuple(self._choose(point).values()), verdict=one.verdict, reason=one.reason, good=one.good,
                    bad=one.bad, reused=one.reused,
                )
                for point, one in self._seen.items()
            ),
            flaky=self.flaky,
            confidence=max(0.0, 1.0 - sum(self._chance_wrong(abs(one.good - one.bad)) for one in tallies)),
            environments=sum(one.verdict is not Verdict.CANNOT_BUILD for one in tallies),
            runs=sum(one.runs for one in tallies),
            seconds=round(time.monotonic() - started, 1),
        )  # fmt: skip

    def _search(self, moving: list[int]) -> tuple[SearchEnd, list[AxisCulprit], tuple[str, ...]]:
        for moved, wanted, otherwise in (
            ((), Verdict.GOOD, SearchEnd.GOOD_IS_BAD),
            (moving, Verdict.BAD, SearchEnd.BAD_IS_GOOD),
        ):
            verdict = self._decide(self._corner(moved))
            if not verdict.tells:
                unbuilt = verdict is Verdict.CANNOT_BUILD
                return SearchEnd.END_UNBUILT if unbuilt else SearchEnd.END_UNTOLD, [], ()
            if verdict is not wanted:
                return otherwise, [], ()
        alone = {number: self._decide(self._corner([number])) for number in moving}
        sets = [([number], True) for number, verdict in alone.items() if verdict is Verdict.BAD]
        if not sets:
            sets = [self._reduce(moving)]
        culprits = [self._find_turns(axes, minimal) for axes, minimal in sets]
        named = {number for axes, _ in sets for number in axes}
        innocent = tuple(
            self.axes[number].name for number in moving if number not in named and alone[number] is Verdict.GOOD
        )
        closed = all(one.is_minimal and all(turn.is_closed for turn in one.turns) for one in culprits)
        return SearchEnd.FOUND if closed else SearchEnd.NARROWED, culprits, innocent

    def _reduce(self, moving: list[int]) -> tuple[list[int], bool]:
        """Axes that are bad together and cannot be put back, and whether putting each back was seen to be good."""
        kept, minimal = list(moving), True
        for number in moving:
            without = [one for one in kept if one != number]
            verdict = self._decide(self._corner(without))
            if verdict is Verdict.BAD:
                kept = without
            else:
                minimal &= verdict is Verdict.GOOD
        return kept, minimal

    def _find_turns(self, moved: list[int], minimal: bool) -> AxisCulprit:
        turns = tuple(self._find_turn(number, self._corner(moved)) for number in moved)
        return AxisCulprit(axes=tuple(self.axes[number].name for number in moved), is_minimal=minimal, turns=turns)

    def _find_turn(self, number: int, corner: Point) -> Turn:
        """Where along one axis good turns into bad, the others being held."""
        axis = self.axes[number]

        def at(value: int) -> Point:
            return (*corner[:number], value, *corner[number + 1 :])

        starts_good = self._decide(at(0)) is Verdict.GOOD
        good, bad, untold = 0 if starts_good else -1, len(axis.values) - 1, set() if starts_good else {0}
        absent = {value for value, name in enumerate(axis.values) if name in axis.absent}
        while len(untold) < self.patience and (value := _choose_value(good, bad, untold, absent)) is not None:
            verdict = self._decide(at(value))
            if verdict is Verdict.GOOD:
                good = value
            elif verdict is Verdict.BAD:
                bad = value
            else:
                untold.add(value)
        between = range(good + 1, bad)
        held = self._choose(corner)
        del held[axis.name]
        return Turn(
            axis=axis.name,
            held=held,
            last_good=axis.values[good] if good >= 0 else "",
            first_bad=axis.values[good + 1 : bad + 1],
            untold={axis.values[value]: self._seen[at(value)].reason for value in between if value in untold},
            absent=tuple(axis.values[value] for value in between if value in absent),
            untried=tuple(axis.values[value] for value in between if value not in untold | absent),
        )

    def _decide(self, point: Point) -> Verdict:
        """The verdict on a point; run once, or until one verdict leads as far as the flakiness wants."""
        if point in self._seen:
            return self._seen[point].verdict
        tally = self._seen[point] = _Tally()
        needed = self._needed_lead()
        most = 1 if not self.flaky else math.ceil(10 * needed / (1 - 2 * self.flaky))
        while abs(tally.good - tally.bad) < needed and tally.runs < most:
            answer = self._ask(point, tally)
            tally.reason = answer.reason
            if not answer.verdict.tells:
                tally.verdict = answer.verdict
                return tally.verdict
            tally.good += answer.verdict is Verdict.GOOD
            tally.bad += answer.verdict is Verdict.BAD
        if abs(tally.good - tally.bad) >= needed:
            tally.verdict = Verdict.GOOD if tally.good > tally.bad else Verdict.BAD
        else:
            tally.reason = f"{tally.good} good and {tally.bad} bad runs: flakier than the stated {self.flaky:g}"
        return tally.verdict

    def _ask(self, point: Point, tally: _Tally) -> Answer:
        """One run of a point, or what the folder has of it. A file is whole or absent; a damaged file is absent."""
        choices, known = self._choose(point), False
        try:
            tally.identity = tally.identity or self.judge.identify(choices)
            key = {**self.question, "choices": choices, "environment": tally.identity, "run": tally.runs}
            digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
            place = self.answers / f"{self.question['module']}-{digest}.json"
            answer = _read_answer(place)
            known = answer is not None
            if answer is None:
                answer = self.judge.judge(choices, tally.runs)
                if answer.lasting:
                    write_whole(place, answer.model_dump_json(indent=2) + "\n")
        except NotBuilt as fault:
            answer = Answer(verdict=Verdict.CANNOT_BUILD, reason=str(fault), lasting=False)
        tally.runs += answer.verdict is not Verdict.CANNOT_BUILD  # where nothing was built nothing was run
        tally.reused += known
        self.progress(choices, answer, known)
        return answer

    def _needed_lead(self) -> int:
        """Lead that decides a point (Wald, 1945), so that all points of a search are right but for `error`."""
        if not self.flaky:
            return 1
        points = 2 + 2 * len(self.axes) + sum(math.ceil(math.log2(len(axis.values))) for axis in self.axes)
        wrong = self.error / points
        return max(1, math.ceil(math.log((1 - wrong) / wrong) / math.log((1 - self.flaky) / self.flaky)))

    def _chance_wrong(self, lead: int) -> float:
        return 1 / (1 + ((1 - self.flaky) / self.flaky) ** lead) if self.flaky and lead else 0.0

    def _corner(self, moved: Iterable[int]) -> Point:
        """The point at which some axes are at the bad end, and the others at the good end."""
        at_bad = set(moved)
        return tuple(len(axis.values) - 1 if number in at_bad else 0 for number, axis in enumerate(self.axes))

    def _choose(self, point: Point) -> dict[str, str]:
        return {axis.name: axis.values[at] for axis, at in zip(self.axes, point, strict=True)}


def _choose_value(good: int, bad: int, untold: set[int], absent: set[int]) -> int | None:
    """The value between `good` and `bad` to try next; None where there is none left.

    The middle one, and away from values that could not be told: releases that cannot be built come in runs.
    """
    steps = [value for value in range(good + 1, bad) if value not in absent]
    blind = [rank for rank, value in enumerate(steps) if value in untold]

    def weight(rank: int) -> float:
        apart = min((abs(rank - other) for other in blind), default=len(steps))
        return min(rank + 1, len(steps) - rank) * (1 - (1 / 3) ** apart)

    best = max((rank for rank in range(len(steps)) if rank not in blind), key=weight, default=None)
    return None if best is None else steps[best]


def _read_answer(place: Path) -> Answer | None:
    try:
        return Answer.model_validate_json(place.read_bytes())
    except (OSError, ValidationError):
        return None
