"""The search against planted culprits: the right axis and release, no more points than it takes, and kept answers."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.search import Answer, Axis, BisectResult, NotBuilt, Search, SearchEnd, Verdict
from megacpp_validate.errors import Exit

BAD, GOOD, UNBUILT, UNTOLD = Verdict.BAD, Verdict.GOOD, Verdict.CANNOT_BUILD, Verdict.CANNOT_TELL
NAMES = ("te", "cudnn", "torch", "flash-attn")
Turns = dict[str, tuple[str, tuple[str, ...]]]


@dataclass
class Truth:
    """What is so: bad where any culprit, a set of axes with a value each, is reached; some points give no answer."""

    culprits: tuple[dict[int, int], ...]
    untold: Callable[[tuple[int, ...]], Verdict | None] = lambda _: None
    flaky: float = 0.0
    asked: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def identify(self, choices: Mapping[str, str]) -> str:
        point = tuple(int(value[1:]) for value in choices.values())
        if self.untold(point) is UNBUILT:
            self.asked[point] += 1
            raise NotBuilt(f"no environment at {point}")
        return str(point)

    def judge(self, choices: Mapping[str, str], run: int) -> Answer:
        point = tuple(int(value[1:]) for value in choices.values())
        self.asked[point] += 1
        if untold := self.untold(point):
            return Answer(verdict=untold, reason=f"{untold.value} at {point}")
        bad = any(all(point[axis] >= turn for axis, turn in one.items()) for one in self.culprits)
        bad ^= random.Random(f"{point} {run}").random() < self.flaky
        return Answer(verdict=BAD if bad else GOOD, reason="seen")


def find(sizes: Sequence[int], truth: Truth, folder: Path, **options: Any) -> BisectResult:
    axes = tuple(
        Axis(name=name, values=tuple(f"v{number}" for number in range(size)), absent=options.get("absent", ()))
        for name, size in zip(NAMES, sizes, strict=False)
    )
    options.pop("absent", None)
    question = {"tool": "t", "tier": "gpu", "module": "attention"}
    return Search(question, axes, truth, folder, **options).run()


def turns_of(found: BisectResult) -> dict[frozenset[str], Turns]:
    return {
        frozenset(one.axes): {turn.axis: (turn.last_good, turn.first_bad) for turn in one.turns}
        for one in found.culprits
    }


@pytest.mark.parametrize("size", [2, 3, 8, 30, 60])
def test_every_culprit_of_a_row_of_releases_is_found_in_few_runs(size: int, tmp_path: Path) -> None:
    for turn in range(1, size):
        truth = Truth(({0: turn},))
        found = find([size], truth, tmp_path / str(turn))
        assert turns_of(found) == {frozenset({"te"}): {"te": (f"v{turn - 1}", (f"v{turn}",))}}
        assert (found.end, found.exit) == (SearchEnd.FOUND, Exit.CLOSED)
        assert found.runs == sum(truth.asked.values()) <= math.ceil(math.log2(size)) + 2


ENDS: list[tuple[dict[tuple[int, ...], Verdict], tuple[dict[int, int], ...], SearchEnd, Exit, int]] = [
    ({}, ({0: 0},), SearchEnd.GOOD_IS_BAD, Exit.WRONG_ARGUMENTS, 1),
    ({}, (), SearchEnd.BAD_IS_GOOD, Exit.WRONG_ARGUMENTS, 2),
    ({(0,): UNBUILT}, ({0: 3},), SearchEnd.END_UNBUILT, Exit.NO_ENVIRONMENT, 1),
    ({(0,): UNTOLD}, ({0: 3},), SearchEnd.END_UNTOLD, Exit.EVIDENCE_MISSING, 1),
    ({(9,): UNBUILT}, ({0: 3},), SearchEnd.END_UNBUILT, Exit.NO_ENVIRONMENT, 2),
    ({(9,): UNTOLD}, ({0: 3},), SearchEnd.END_UNTOLD, Exit.EVIDENCE_MISSING, 2),
]


@pytest.mark.parametrize(("untold", "culprits", "end", "code", "points"), ENDS)
def test_ends_that_are_not_what_was_said_end_the_search(
    untold: dict[Any, Verdict], culprits: Any, end: SearchEnd, code: Exit, points: int, tmp_path: Path
) -> None:
    found = find([10], Truth(culprits, untold.get), tmp_path)
    assert (found.end, found.exit, found.culprits, found.innocent, len(found.points)) == (end, code, (), (), points)
    assert found.points[-1].reason


SETS: dict[str, tuple[list[int], tuple[dict[int, int], ...], dict[frozenset[str], Turns], set[str]]] = {
    "one of two": ([10, 5], ({1: 3},), {frozenset({"cudnn"}): {"cudnn": ("v2", ("v3",))}}, {"te"}),
    "the last of four": ([3, 4, 2, 9], ({3: 8},), {frozenset({"flash-attn"}): {"flash-attn": ("v7", ("v8",))}},
                         {"te", "cudnn", "torch"}),
    "two alone": ([30, 9, 4], ({0: 17}, {1: 3}), {frozenset({"te"}): {"te": ("v16", ("v17",))},
                  frozenset({"cudnn"}): {"cudnn": ("v2", ("v3",))}}, {"torch"}),
    "two together": ([10, 5, 3], ({0: 6, 1: 2},),
                     {frozenset({"te", "cudnn"}): {"te": ("v5", ("v6",)), "cudnn": ("v1", ("v2",))}}, {"torch"}),
    "a held axis": ([1, 7], ({1: 3},), {frozenset({"cudnn"}): {"cudnn": ("v2", ("v3",))}}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_the_axes_are_found_and_where_along_each(name: str, tmp_path: Path) -> None:
    sizes, culprits, turns, innocent = SETS[name]
    truth = Truth(culprits)
    found = find(sizes, truth, tmp_path)
    assert (turns_of(found), found.end, set(found.innocent)) == (turns, SearchEnd.FOUND, innocent)
    assert max(truth.asked.values()) == 1


@pytest.mark.parametrize("kind", [UNBUILT, UNTOLD])
@pytest.mark.parametrize(("turn", "dark"), [(5, {4, 5, 6}), (20, set(range(10, 20))), (1, {1}), (28, {3, 27, 28})])
def test_releases_without_an_answer_widen_the_range_and_never_move_it(
    turn: int, dark: set[int], kind: Verdict, tmp_path: Path
) -> None:
    truth = Truth(({0: turn},), lambda point: kind if point[0] in dark else None)
    found = find([30], truth, tmp_path, patience=30)
    (one,) = found.culprits[0].turns
    last = max(value for value in range(turn) if value not in dark)
    first = min(value for value in range(turn, 30) if value not in dark)
    assert one.last_good == f"v{last}"
    assert one.first_bad == tuple(f"v{value}" for value in range(last + 1, first + 1))
    assert set(one.untold) == {f"v{value}" for value in range(last + 1, first)}
    assert found.end is (SearchEnd.FOUND if first == last + 1 else SearchEnd.NARROWED)


def test_a_long_row_without_an_answer_ends_with_the_range_that_it_has(tmp_path: Path) -> None:
    truth = Truth(({0: 30},), lambda point: UNBUILT if 5 < point[0] < 50 else None)
    found = find([60], truth, tmp_path, patience=4)
    (turn,) = found.culprits[0].turns
    assert (found.end, found.exit, len(turn.untold)) == (SearchEnd.NARROWED, Exit.EVIDENCE_MISSING, 4)
    assert set(turn.untold) | set(turn.untried) | {turn.first_bad[-1]} == set(turn.first_bad)


def test_what_is_absent_is_never_tried(tmp_path: Path) -> None:
    truth = Truth(({0: 6},))
    found = find([12], truth, tmp_path, absent=("v4", "v5", "v6", "v9"))
    (turn,) = found.culprits[0].turns
    assert (turn.last_good, turn.first_bad, turn.absent) == ("v3", ("v4", "v5", "v6", "v7"), ("v4", "v5", "v6"))
    assert not {(4,), (5,), (6,), (9,)} & truth.asked.keys()


def test_a_mix_that_cannot_be_told_leaves_the_axes_together_and_clears_nobody(tmp_path: Path) -> None:
    # A new Transformer Engine does not import with the old cuDNN, nor the old one with the new.
    found = find([10, 2], Truth(({0: 6},), lambda p: UNTOLD if (p[0] > 4) != (p[1] > 0) else None), tmp_path)
    (culprit,) = found.culprits
    assert (culprit.axes, culprit.is_minimal, found.innocent) == (("te", "cudnn"), False, ())
    assert found.end is SearchEnd.NARROWED


def test_answers_are_kept_and_damaged_ones_are_asked_again(tmp_path: Path) -> None:
    first, again = Truth(({0: 9},)), Truth(({0: 9},))
    found = find([20], first, tmp_path)
    next(iter(sorted(tmp_path.glob("*.json")))).write_text('{"verdict": "go')
    known = find([20], again, tmp_path)
    assert (turns_of(known), known.runs, sum(again.asked.values())) == (turns_of(found), found.runs, 1)
    assert sum(point.reused for point in known.points) == found.runs - 1
    other = Truth(({0: 9},))
    Search({"tool": "t", "tier": "gpu", "module": "permute"}, found.axes, other, tmp_path).run()
    assert sum(other.asked.values()) == found.runs, "another question"


def test_what_is_not_built_is_not_kept(tmp_path: Path) -> None:
    find([10], Truth(({0: 3},), {(0,): UNBUILT}.get), tmp_path)
    assert not list(tmp_path.glob("*.json"))
    assert find([10], Truth(({0: 3},)), tmp_path).end is SearchEnd.FOUND


def test_flaky_runs_are_repeated_until_one_verdict_leads(tmp_path: Path) -> None:
    for number in range(20):
        truth = Truth(({0: 9},), flaky=0.1)
        found = find([20], truth, tmp_path / str(number), flaky=0.1, error=0.01)
        assert turns_of(found) == {frozenset({"te"}): {"te": ("v8", ("v9",))}}
        assert found.confidence > 0.98
        assert min(truth.asked.values()) >= 3
    coin = find([4], Truth(({0: 2},), flaky=0.5), tmp_path / "coin", flaky=0.05, error=0.001)
    assert coin.end is not SearchEnd.FOUND or any(point.good and point.bad for point in coin.points)
