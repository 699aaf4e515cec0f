"""Planted culprits: a truth that answers a search as an environment would, and counts what it is asked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from megacpp_validate.canary.dynamic.bisect_result import Answer, Axis, Verdict
from megacpp_validate.canary.dynamic.search.repeats import Trust
from megacpp_validate.canary.dynamic.search.search import PATIENCE, Conclusion, Point, search

NAMES = ("te", "cudnn", "torch", "flash-attn")


def make_axes(sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Axes whose values are v0, v1, ..."""
    return tuple(
        Axis(name=name, values=tuple(f"v{number}" for number in range(size)))
        for name, size in zip(NAMES, sizes, strict=False)
    )


@dataclass
class Truth:
    """What is so.

    Attributes:
        culprits: each a set of axes with the value from which on it is bad; bad where any of them has all reached.
        untold: points that give no answer, and which.
        flaky: how often a run is wrong.
        asked: how often each point was run.
    """

    culprits: tuple[dict[int, int], ...]
    untold: Callable[[Point], Verdict | None] = lambda _: None
    flaky: float = 0.0
    seed: int = 0
    asked: Counter[Point] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def answer(self, point: Point) -> Answer:
        self.asked[point] += 1
        if untold := self.untold(point):
            return Answer(verdict=untold, reason=f"{untold.value} at {point}")
        bad = any(all(point[axis] >= turn for axis, turn in one.items()) for one in self.culprits)
        if self.chance.random() < self.flaky:
            bad = not bad
        return Answer(verdict=Verdict.BAD if bad else Verdict.GOOD, reason="seen")

    @property
    def runs(self) -> int:
        return sum(self.asked.values())


def drive(steps: Generator[Point, Answer, Conclusion], answer: Callable[[Point], Answer]) -> Conclusion:
    """Answer a search to its end."""
    try:
        point = next(steps)
        while True:
            point = steps.send(answer(point))
    except StopIteration as ended:
        return ended.value


def find(sizes: Sequence[int], truth: Truth, trust: Trust | None = None, patience: int = PATIENCE) -> Conclusion:
    """Search axes of these sizes for a planted culprit."""
    return drive(search(make_axes(sizes), trust, patience), truth.answer)


def turns_of(found: Conclusion) -> dict[frozenset[str], dict[str, tuple[str, tuple[str, ...]]]]:
    """By culprit and axis: the last good value and the first bad ones."""
    return {
        frozenset(one.axes): {turn.axis: (turn.last_good, turn.first_bad) for turn in one.turns}
        for one in found.culprits
    }
