"""The search as a generator: it yields the point that it asks for, is sent an answer, and ends in a conclusion.

First both ends; then which axes have to move for it to be bad; then where along each of them. Nothing here starts
anything or reads a clock, so that the same answers lead to the same points: a search is gone on with by starting it
again with the answers that are there.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from ..bisect_result import Answer, Axis, AxisCulprit, Contradiction, PointResult, SearchEnd, Turn, Verdict
from .axis_sets import MOST_AXES, Family, all_families, choose_set, is_bad, keep_fitting, least_sets
from .line import choose_value
from .repeats import Trust

Point = tuple[int, ...]
"""The index of a value on each axis."""

PATIENCE = 8  # values of one axis that could not be told, before the search ends with the range that it has


@dataclass(frozen=True)
class Conclusion:
    """What a search concludes; see `BisectResult` for the fields."""

    end: SearchEnd
    points: tuple[PointResult, ...]
    culprits: tuple[AxisCulprit, ...] = ()
    innocent: tuple[str, ...] = ()
    confidence: float = 1.0
    unlike_stated: tuple[tuple[str, ...], ...] = ()


def search(
    axes: Sequence[Axis], trust: Trust | None = None, patience: int = PATIENCE
) -> Generator[Point, Answer, Conclusion]:
    """Search from the first values of all axes, which are good, to the last, which are bad.

    Args:
        axes: at least one that has two values, at most four such; the others are held.
        trust: in a single run; without it each point is run once and never again.
        patience: values of one axis that could not be told, before the search ends with a range.

    Raises:
        ValueError: no axis moves, or too many do.
    """
    moving = [number for number, axis in enumerate(axes) if len(axis.values) > 1]
    if not 1 <= len(moving) <= MOST_AXES:
        raise ValueError(
            f"{len(moving)} axes have more than one value; 1 to {MOST_AXES} can be searched. Next step: give a good "
            "end and a bad end that differ, and hold what is not suspected."
        )
    return _Search(tuple(axes), moving, trust or Trust(), patience).run()


@dataclass
class _Tally:
    """The runs of one point."""

    good: int = 0
    bad: int = 0
    reasons: dict[Verdict, str] = field(default_factory=dict)
    verdict: Verdict = Verdict.CANNOT_TELL

    @property
    def runs(self) -> int:
        return self.good + self.bad

    @property
    def lead(self) -> int:
        return abs(self.good - self.bad)


@dataclass
class _Search:
    axes: tuple[Axis, ...]
    moving: list[int]
    trust: Trust
    patience: int
    seen: dict[Point, _Tally] = field(default_factory=dict)
    shares: float = 1.0  # into which the allowed error is cut, one a point

    def run(self) -> Generator[Point, Answer, Conclusion]:
        count = len(self.moving)
        self.shares = 2 * max(2, 3 * count - 2)  # half of it: one culprit shows itself at that many corners at most
        for moved, wanted, otherwise in (
            (0, Verdict.GOOD, SearchEnd.GOOD_IS_BAD),
            ((1 << count) - 1, Verdict.BAD, SearchEnd.BAD_IS_GOOD),
        ):
            verdict = yield from self._decide(self._corner(moved))
            if verdict is Verdict.CANNOT_BUILD:
                return self._conclude(SearchEnd.END_UNBUILT)
            if verdict is Verdict.CANNOT_TELL:
                return self._conclude(SearchEnd.END_UNTOLD)
            if verdict is not wanted:
                return self._conclude(otherwise)
        left, least = yield from self._find_axes()
        self.shares = self._share_rest(least)
        culprits = []
        for axes in least:
            culprit = yield from self._find_turns(axes, left)
            culprits.append(culprit)
        is_closed = all(one.is_minimal and all(turn.is_closed for turn in one.turns) for one in culprits)
        innocent = tuple(
            self.axes[number].name
            for place, number in enumerate(self.moving)
            if not any(axes >> place & 1 for family in left for axes in family)
        )
        return self._conclude(SearchEnd.FOUND if is_closed else SearchEnd.NARROWED, tuple(culprits), innocent)

    # --- a point --------------------------------------------------------------------------------------------

    def _decide(self, point: Point) -> Generator[Point, Answer, Verdict]:
        """The verdict on a point; asked for once, or as often as the stated flakiness wants."""
        if point in self.seen:
            return self.seen[point].verdict
        tally = self.seen[point] = _Tally()
        needed = self.trust.needed_lead(self.shares)
        most = self.trust.most_runs(needed)
        while tally.lead < needed and tally.runs < most:
            answer = yield point
            tally.reasons[answer.verdict] = answer.reason
            if not answer.verdict.tells:
                tally.verdict = answer.verdict
                return tally.verdict
            tally.good += answer.verdict is Verdict.GOOD
            tally.bad += answer.verdict is Verdict.BAD
        if tally.lead >= needed:
            tally.verdict = Verdict.GOOD if tally.good > tally.bad else Verdict.BAD
        else:
            tally.reasons[Verdict.CANNOT_TELL] = (
                f"{tally.good} good and {tally.bad} bad runs: it is flakier than the stated {self.trust.flaky:g}"
            )
        return tally.verdict

    def _share_rest(self, least: Sequence[int]) -> float:
        """Cut what is left of the allowed error among the points that tell where along each axis it turns bad."""
        sizes = [
            len(self.axes[number].values)
            for axes in least
            for place, number in enumerate(self.moving)
            if axes >> place & 1
        ]
        points = sum(math.ceil(math.log2(size)) for size in sizes)
        rest = self.trust.error - self._chance_wrong()
        return points * self.trust.error / rest

    def _chance_wrong(self) -> float:
        """Probability that one of the verdicts so far is wrong."""
        return sum(self.trust.chance_wrong(tally.lead) for tally in self.seen.values() if tally.verdict.tells)

    def _corner(self, moved: int) -> Point:
        """The point at which the axes of a set are at the bad end, and the others at the good end."""
        point = [0] * len(self.axes)
        for place, number in enumerate(self.moving):
            if moved >> place & 1:
                point[number] = len(self.axes[number].values) - 1
        return tuple(point)

    # --- which axes -----------------------------------------------------------------------------------------

    def _find_axes(self) -> Generator[Point, Answer, tuple[tuple[Family, ...], tuple[int, ...]]]:
        """The families of minimal bad sets that fit, and the minimal bad sets to search along."""
        count = len(self.moving)
        told = {0: False, (1 << count) - 1: True}
        untold: set[int] = set()
        left = all_families(count)
        while (moved := choose_set(left, count, told.keys() | untold)) is not None:
            verdict = yield from self._decide(self._corner(moved))
            if verdict.tells:
                told[moved] = verdict is Verdict.BAD
                left = keep_fitting(left, told)
            else:
                untold.add(moved)
        if len(left) == 1:
            return left, tuple(sorted(left[0]))
        return left, least_sets([moved for moved, bad in told.items() if bad])

    # --- where along them -----------------------------------------------------------------------------------

    def _find_turns(self, moved: int, left: tuple[Family, ...]) -> Generator[Point, Answer, AxisCulprit]:
        """Where along each axis of a set good turns into bad, the others of the set being at their bad end."""
        places = [place for place in range(len(self.moving)) if moved >> place & 1]
        turns, is_minimal = [], True
        for place in places:
            # Without this axis it is good, by every family that fits; else that was asked for, and could not be told.
            is_needed = not any(is_bad(family, moved & ~(1 << place)) for family in left)
            is_minimal &= is_needed
            turn = yield from self._find_turn(self.moving[place], self._corner(moved), starts_good=is_needed)
            turns.append(turn)
        names = tuple(self.axes[self.moving[place]].name for place in places)
        return AxisCulprit(axes=names, is_minimal=is_minimal, turns=tuple(turns))

    def _find_turn(self, number: int, corner: Point, *, starts_good: bool) -> Generator[Point, Answer, Turn]:
        """Where along one axis good turns into bad."""
        values = self.axes[number].values
        good, bad = (0 if starts_good else -1), len(values) - 1

        def at(value: int) -> Point:
            return (*corner[:number], value, *corner[number + 1 :])

        untold = set() if starts_good else {0}
        absent = {value for value, name in enumerate(values) if name in self.axes[number].absent}
        while len(untold) < self.patience and (value := choose_value(good, bad, untold, absent)) is not None:
            verdict = yield from self._decide(at(value))
            if verdict is Verdict.GOOD:
                good = value
            elif verdict is Verdict.BAD:
                bad = value
            else:
                untold.add(value)
        between = range(good + 1, bad)
        held = zip(self.axes, self._name(corner), strict=True)
        seen = {value: self.seen[at(value)] for value in between if value in untold}
        return Turn(
            axis=self.axes[number].name,
            held={axis.name: value for axis, value in held if axis is not self.axes[number]},
            last_good=values[good] if good >= 0 else "",
            first_bad=tuple(values[good + 1 : bad + 1]),
            untold={values[value]: tally.reasons[tally.verdict] for value, tally in seen.items()},
            absent=tuple(values[v] for v in between if v in absent),
            untried=tuple(values[v] for v in between if v not in untold | absent),
        )

    # --- the end --------------------------------------------------------------------------------------------

    def _conclude(
        self, end: SearchEnd, culprits: tuple[AxisCulprit, ...] = (), innocent: tuple[str, ...] = ()
    ) -> Conclusion:
        return Conclusion(
            end,
            tuple(self._tell_point(point, tally) for point, tally in self.seen.items()),
            culprits,
            innocent,
            max(0.0, 1 - self._chance_wrong()),
            tuple(
                self._name(point)
                for point, tally in self.seen.items()
                if self.trust.is_unlikely(min(tally.good, tally.bad), tally.runs)
            ),
        )

    def _tell_point(self, point: Point, tally: _Tally) -> PointResult:
        return PointResult(
            choices=self._name(point),
            verdict=tally.verdict,
            reason=tally.reasons.get(tally.verdict, ""),
            good=tally.good,
            bad=tally.bad,
            wrong=self.trust.chance_wrong(tally.lead) if tally.verdict.tells else 0.0,
        )

    def _name(self, point: Point) -> tuple[str, ...]:
        return name_point(self.axes, point)


def name_point(axes: Sequence[Axis], point: Point) -> tuple[str, ...]:
    """The values of a point."""
    return tuple(axis.values[at] for axis, at in zip(axes, point, strict=True))


def find_contradictions(axes: Sequence[Axis], verdicts: dict[Point, Verdict]) -> tuple[Contradiction, ...]:
    """Every bad point with a good one that lies further on along each axis, or as far.

    A search asks for nothing that its answers imply, so that it cannot contradict itself: it takes for granted that
    what is bad stays bad. Answers of other searches may show that this is not so.
    """
    return tuple(
        Contradiction(bad=name_point(axes, low), good=name_point(axes, high))
        for low, bad in verdicts.items()
        for high, good in verdicts.items()
        if bad is Verdict.BAD and good is Verdict.GOOD and all(a <= b for a, b in zip(low, high, strict=True))
    )
