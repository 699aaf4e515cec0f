"""The search against planted culprits: the right axis and release, in no more points than halving takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.search import NOT_HERE, Answer, Axis, BisectResult, SearchEnd, Verdict, search
from megacpp_validate.errors import Exit, NoEnvironment

BAD, GOOD, UNBUILT, UNTOLD = Verdict.BAD, Verdict.GOOD, Verdict.CANNOT_BUILD, Verdict.CANNOT_TELL
NAMES = ("te", "cudnn", "torch", "flash-attn")


@dataclass
class Truth:
    """Bad where any culprit, a set of axes with a value each, is reached; some points give no answer."""

    culprits: tuple[dict[int, int], ...]
    untold: Callable[[tuple[int, ...]], Verdict | None] = lambda _: None
    is_bad_in: int = 0  # the run in which a bad point shows it
    runs: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __call__(self, choices: Mapping[str, str], run: int) -> Answer:
        point = tuple(int(value[1:]) for value in choices.values())
        self.runs[point] += 1
        untold = self.untold(point)
        if untold is UNBUILT:
            raise NoEnvironment(f"no environment at {point}")
        if untold:
            return Answer(verdict=untold, reason=f"{untold.value} at {point}")
        bad = any(all(point[axis] >= turn for axis, turn in one.items()) for one in self.culprits)
        return Answer(verdict=BAD if bad and run >= self.is_bad_in else GOOD, reason="seen")


def find(sizes: Sequence[int], truth: Truth, absent: tuple[str, ...] = (), **options: Any) -> BisectResult:
    axes = [
        Axis(name=name, values=tuple(f"v{number}" for number in range(size)), absent=absent)
        for name, size in zip(NAMES, sizes, strict=False)
    ]
    return search(axes, truth, module="attention", tier="gpu", **options)


def turns_of(found: BisectResult) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {turn.axis: (turn.last_good, turn.first_bad) for turn in found.culprits}


@pytest.mark.parametrize("size", [2, 3, 8, 30, 60])
def test_every_culprit_of_a_row_of_releases_is_found_in_few_runs(size: int) -> None:
    for turn in range(1, size):
        truth = Truth(({0: turn},))
        found = find([size], truth)
        assert turns_of(found) == {"te": (f"v{turn - 1}", (f"v{turn}",))}
        assert (found.end, found.exit) == (SearchEnd.FOUND, Exit.CLOSED)
        assert sum(truth.runs.values()) == len(found.points) <= math.ceil(math.log2(size)) + 2


ENDS: list[tuple[dict[tuple[int, ...], Verdict], tuple[dict[int, int], ...], SearchEnd, Exit, int]] = [
    ({}, ({0: 0},), SearchEnd.GOOD_IS_BAD, Exit.WRONG_ARGUMENTS, 1),
    ({}, (), SearchEnd.BAD_IS_GOOD, Exit.WRONG_ARGUMENTS, 2),
    ({(0,): UNBUILT}, ({0: 3},), SearchEnd.END_UNBUILT, Exit.NO_ENVIRONMENT, 1),
    ({(0,): UNTOLD}, ({0: 3},), SearchEnd.END_UNTOLD, Exit.EVIDENCE_MISSING, 1),
    ({(9,): UNBUILT}, ({0: 3},), SearchEnd.END_UNBUILT, Exit.NO_ENVIRONMENT, 2),
    ({(9,): UNTOLD}, ({0: 3},), SearchEnd.END_UNTOLD, Exit.EVIDENCE_MISSING, 2),
]


@pytest.mark.parametrize(("untold", "culprits", "end", "code", "points"), ENDS)
def test_ends_that_are_not_as_given_end_the_search(
    untold: dict[Any, Verdict], culprits: Any, end: SearchEnd, code: Exit, points: int
) -> None:
    found = find([10], Truth(culprits, untold.get))
    assert (found.end, found.exit, found.culprits, found.innocent, len(found.points)) == (end, code, (), (), points)
    assert found.points[-1].reason
    assert found.points[-1].runs == (end is not SearchEnd.END_UNBUILT)


AXES: dict[str, tuple[list[int], tuple[dict[int, int], ...], tuple[str, str, str], dict[str, str], set[str]]] = {
    "one of two": ([10, 5], ({1: 3},), ("cudnn", "v2", "v3"), {"te": "v9"}, {"te"}),
    "the last of four": ([3, 4, 2, 9], ({3: 8},), ("flash-attn", "v7", "v8"),
                         {"te": "v2", "cudnn": "v3", "torch": "v1"}, {"te", "cudnn", "torch"}),
    "each alone: the first that is moved": ([30, 9], ({0: 17}, {1: 3}), ("te", "v16", "v17"), {"cudnn": "v0"},
                                            {"cudnn"}),
    "two together: the second, with the first held": ([10, 5], ({0: 6, 1: 2},), ("cudnn", "v1", "v2"), {"te": "v9"},
                                                      set()),
    "an axis that does not change": ([1, 7], ({1: 3},), ("cudnn", "v2", "v3"), {"te": "v0"}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", AXES)
def test_the_axis_is_found_and_where_along_it(name: str) -> None:
    sizes, culprits, (axis, good, bad), held, innocent = AXES[name]
    truth = Truth(culprits)
    found = find(sizes, truth)
    assert (turns_of(found), found.end, set(found.innocent)) == ({axis: (good, (bad,))}, SearchEnd.FOUND, innocent)
    assert found.culprits[0].held == held
    assert max(truth.runs.values()) == 1


@pytest.mark.parametrize("kind", [UNBUILT, UNTOLD])
@pytest.mark.parametrize(("turn", "dark"), [(5, {4, 5, 6}), (20, set(range(10, 20))), (1, {1}), (28, {3, 27, 28})])
def test_releases_without_an_answer_widen_the_range_and_never_move_it(turn: int, dark: set[int], kind: Verdict) -> None:
    found = find([30], Truth(({0: turn},), lambda point: kind if point[0] in dark else None))
    (one,) = found.culprits
    last = max(value for value in range(turn) if value not in dark)
    first = min(value for value in range(turn, 30) if value not in dark)
    assert (one.last_good, one.first_bad) == (f"v{last}", tuple(f"v{value}" for value in range(last + 1, first + 1)))
    assert set(one.untold) == {f"v{value}" for value in range(last + 1, first)}
    assert all(one.untold.values())
    closed = first == last + 1
    assert (found.end, found.exit) == (
        (SearchEnd.FOUND, Exit.CLOSED) if closed else (SearchEnd.NARROWED, Exit.EVIDENCE_MISSING)
    )


def test_what_is_absent_is_never_tried() -> None:
    truth = Truth(({0: 6},))
    (turn,) = find([12], truth, ("v4", "v5", "v6", "v9")).culprits
    assert (turn.last_good, turn.first_bad) == ("v3", ("v4", "v5", "v6", "v7"))
    assert turn.untold == dict.fromkeys(("v4", "v5", "v6"), NOT_HERE)
    assert not {(4,), (5,), (6,), (9,)} & truth.runs.keys()


def test_a_mix_without_an_answer_leaves_both_axes_and_clears_none() -> None:
    # A new Transformer Engine does not import with the old cuDNN.
    found = find([10, 2], Truth(({0: 6},), lambda p: UNTOLD if (p[0] > 4) != (p[1] > 0) else None))
    assert turns_of(found) == {"te": ("v4", ("v5", "v6", "v7", "v8", "v9")), "cudnn": ("", ("v1",))}
    assert (found.end, found.innocent) == (SearchEnd.NARROWED, ())


def test_a_failure_that_comes_and_goes_is_found_by_repeated_runs() -> None:
    truth = Truth(({0: 9},), is_bad_in=2)
    assert find([20], truth).end is SearchEnd.BAD_IS_GOOD
    found = find([20], truth, repeat=3)
    assert turns_of(found) == {"te": ("v8", ("v9",))}
    assert {point.runs for point in found.points} == {3}
