"""The search against planted culprits: the right axis and release, and no more points than it takes."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.canary.dynamic.bisect_result import Answer, Axis, SearchEnd, Verdict
from megacpp_validate.canary.dynamic.search.axis_sets import all_families, is_bad
from megacpp_validate.canary.dynamic.search.bound import least_runs
from megacpp_validate.canary.dynamic.search.repeats import Trust
from megacpp_validate.canary.dynamic.search.search import Point, find_contradictions, search
from tests.canary.dynamic.hidden_turns import NAMES, Truth, drive, find, make_axes, turns_of

BAD, GOOD, UNBUILT, UNTOLD = Verdict.BAD, Verdict.GOOD, Verdict.CANNOT_BUILD, Verdict.CANNOT_TELL


def test_every_culprit_of_every_row_of_releases_is_found_in_as_few_runs_as_can_be() -> None:
    for size in range(2, 61):
        worst = 0
        for turn in range(1, size):
            truth = Truth(({0: turn},))
            found = find([size], truth)
            assert found.end is SearchEnd.FOUND
            assert turns_of(found) == {frozenset({"te"}): {"te": (f"v{turn - 1}", (f"v{turn}",))}}
            assert truth.runs == len(truth.asked) <= math.ceil(math.log2(size)) + 2  # 3 is what is promised
            worst = max(worst, truth.runs)
        assert worst == math.ceil(least_runs([size], Trust()))


@pytest.mark.parametrize("size", [2, 3, 30, 60])
def test_both_ends_are_confirmed_before_anything_else(size: int) -> None:
    steps = search(make_axes([size]))
    assert next(steps) == (0,)
    assert steps.send(Answer(verdict=GOOD)) == (size - 1,)


@pytest.mark.parametrize(
    ("untold", "culprits", "end", "runs"),
    [
        ({}, ({0: 0},), SearchEnd.GOOD_IS_BAD, 1),
        ({}, (), SearchEnd.BAD_IS_GOOD, 2),
        ({(0,): UNBUILT}, ({0: 3},), SearchEnd.END_UNBUILT, 1),
        ({(0,): UNTOLD}, ({0: 3},), SearchEnd.END_UNTOLD, 1),
        ({(9,): UNBUILT}, ({0: 3},), SearchEnd.END_UNBUILT, 2),
        ({(9,): UNTOLD}, ({0: 3},), SearchEnd.END_UNTOLD, 2),
    ],
)
def test_ends_that_are_not_what_was_said_end_the_search_and_name_nobody(
    untold: dict[Point, Verdict], culprits: tuple[dict[int, int], ...], end: SearchEnd, runs: int
) -> None:
    truth = Truth(culprits, untold.get)
    found = find([10], truth)
    assert (found.end, found.culprits, found.innocent, truth.runs) == (end, (), (), runs)
    assert found.points[-1].reason


@st.composite
def planted(draw: st.DrawFn) -> tuple[list[int], dict[int, int]]:
    """Sizes of 1 to 4 axes, and one culprit: a set of them with a turn each."""
    sizes = draw(st.lists(st.integers(2, 60), min_size=1, max_size=4))
    chosen = draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
    return sizes, {axis: draw(st.integers(1, sizes[axis] - 1)) for axis in chosen}


@settings(max_examples=200, deadline=None)
@given(planted())
def test_the_axes_are_found_and_where_along_each(case: tuple[list[int], dict[int, int]]) -> None:
    sizes, culprit = case
    truth = Truth((culprit,))
    found = find(sizes, truth)
    names = {NAMES[axis] for axis in culprit}
    assert found.end is SearchEnd.FOUND
    assert turns_of(found) == {
        frozenset(names): {NAMES[axis]: (f"v{turn - 1}", (f"v{turn}",)) for axis, turn in culprit.items()}
    }
    assert set(found.innocent) == set(NAMES[: len(sizes)]) - names
    assert max(truth.asked.values()) == 1
    assert found.confidence == 1.0


@pytest.mark.parametrize(("axes", "most"), [(1, 0), (2, 2), (3, 4), (4, 4)])
def test_one_axis_is_told_from_the_others_in_few_runs(axes: int, most: int) -> None:
    for guilty in range(axes):
        truth = Truth(({guilty: 1},))
        found = find([2] * axes, truth)
        assert found.innocent == tuple(name for at, name in enumerate(NAMES[:axes]) if at != guilty)
        assert truth.runs <= 2 + most


def test_two_culprits_that_are_bad_alone_are_both_named() -> None:
    found = find([30, 9, 4], Truth(({0: 17}, {1: 3})))
    assert found.end is SearchEnd.FOUND
    assert turns_of(found) == {
        frozenset({"te"}): {"te": ("v16", ("v17",))},
        frozenset({"cudnn"}): {"cudnn": ("v2", ("v3",))},
    }
    assert found.innocent == ("torch",)


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_every_way_in_which_axes_can_be_to_blame_is_told_from_every_other(axes: int) -> None:
    for family in all_families(axes):
        culprits = tuple({axis: 1 for axis in range(axes) if least >> axis & 1} for least in family)
        found = find([2] * axes, Truth(culprits))
        assert {frozenset(one.axes) for one in found.culprits} == {
            frozenset(NAMES[axis] for axis in one) for one in culprits
        }
        assert found.end is SearchEnd.FOUND


def test_there_are_as_many_ways_as_there_are_monotone_functions() -> None:
    assert [len(set(all_families(axes))) for axes in range(1, 5)] == [1, 4, 18, 166]
    assert all(is_bad(family, 0b1111) and not is_bad(family, 0) for family in all_families(4))


# --- what cannot be built, or told ------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_releases_without_an_answer_widen_the_range_and_never_move_it(data: st.DataObject) -> None:
    size = data.draw(st.integers(3, 60))
    turn = data.draw(st.integers(1, size - 1))
    dark = data.draw(st.sets(st.integers(1, size - 2)))
    kind = data.draw(st.sampled_from([UNBUILT, UNTOLD]))
    truth = Truth(({0: turn},), lambda point: kind if point[0] in dark else None)
    found = find([size], truth, patience=60)
    ((one,),) = [culprit.turns for culprit in found.culprits]
    last = max(value for value in range(turn) if value not in dark)
    first = min(value for value in range(turn, size) if value not in dark)
    assert one.last_good == f"v{last}"
    assert one.first_bad == tuple(f"v{value}" for value in range(last + 1, first + 1))
    assert set(one.untold) == {f"v{value}" for value in range(last + 1, first)}
    assert one.untried == ()
    assert found.end is (SearchEnd.FOUND if first == last + 1 else SearchEnd.NARROWED)
    assert len([point for point in truth.asked if point[0] not in dark]) <= math.ceil(math.log2(size)) + 4


def test_a_long_row_without_an_answer_ends_the_search_with_the_range_that_it_has() -> None:
    truth = Truth(({0: 30},), lambda point: UNBUILT if 5 < point[0] < 50 else None)
    found = find([60], truth, patience=4)
    (turn,) = found.culprits[0].turns
    assert found.end is SearchEnd.NARROWED
    assert len(turn.untold) == 4
    assert set(turn.untold) | set(turn.untried) | {turn.first_bad[-1]} == set(turn.first_bad)
    assert "v30" in turn.first_bad
    assert truth.runs <= 2 + 4 + math.ceil(math.log2(60))


def test_rows_without_an_answer_cost_no_more_environments_than_promised() -> None:
    size, most = 30, math.ceil(math.log2(30)) + 3
    for turn in range(1, size):
        for start in range(max(1, turn - 8), min(turn + 8, size - 1)):
            for end in (min(start + length, size - 1) for length in (1, 3, 4, 8)):
                dark = range(start, end)
                truth = Truth(({0: turn},), lambda point, dark=dark: UNBUILT if point[0] in dark else None)
                find([size], truth)
                assert len([point for point in truth.asked if point[0] not in dark]) <= most, (turn, dark)


def test_it_jumps_away_from_a_release_that_gives_no_answer() -> None:
    asked: list[int] = []

    def answer(point: Point) -> Answer:
        asked.append(point[0])
        return Answer(verdict=UNBUILT if 12 <= point[0] <= 17 else BAD if point[0] >= 20 else GOOD)

    drive(search(make_axes([30])), answer)
    assert abs(asked[3] - asked[2]) > 3


def test_what_is_known_to_be_absent_is_never_asked_for_and_widens_the_range() -> None:
    values = tuple(f"v{number}" for number in range(12))
    axis = Axis(name="te", values=values, absent=("v4", "v5", "v6", "v9"))
    truth = Truth(({0: 6},))
    found = drive(search((axis,)), truth.answer)
    (turn,) = found.culprits[0].turns
    assert (turn.last_good, turn.first_bad, turn.absent) == ("v3", ("v4", "v5", "v6", "v7"), ("v4", "v5", "v6"))
    assert found.end is SearchEnd.NARROWED
    assert not {(4,), (5,), (6,), (9,)} & truth.asked.keys()
    assert truth.runs <= 2 + math.ceil(math.log2(8))


def test_a_mix_that_cannot_be_told_leaves_the_axes_together_and_clears_nobody() -> None:
    # A new Transformer Engine does not import with the old cuDNN, nor the old one with the new.
    truth = Truth(({0: 6},), lambda p: UNTOLD if (p[0] > 4) != (p[1] > 0) else None)
    found = find([10, 2], truth)
    assert found.end is SearchEnd.NARROWED
    (culprit,) = found.culprits
    assert (culprit.axes, culprit.is_minimal, found.innocent) == (("te", "cudnn"), False, ())
    te = next(turn for turn in culprit.turns if turn.axis == "te")
    assert te.first_bad[-1] == "v6"
    assert te.last_good == "v5"


def test_an_axis_that_cannot_be_tried_alone_is_not_called_innocent() -> None:
    truth = Truth(({1: 2},), lambda p: UNBUILT if p[0] and p[1] == 0 else None)
    found = find([5, 4], truth)
    assert turns_of(found) == {frozenset({"cudnn"}): {"cudnn": ("v1", ("v2",))}}
    assert found.end is SearchEnd.FOUND
    assert found.innocent == ()


# --- answers that contradict each other -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [
        ({(0, 0): GOOD, (1, 0): BAD, (2, 1): BAD}, set()),
        ({(1, 0): BAD, (2, 0): GOOD}, {(("v1", "v0"), ("v2", "v0"))}),
        ({(1, 0): BAD, (2, 1): GOOD, (0, 1): GOOD}, {(("v1", "v0"), ("v2", "v1"))}),
        ({(1, 0): BAD, (0, 1): GOOD}, set()),
        ({(1, 0): UNTOLD, (2, 0): GOOD}, set()),
    ],
)
def test_a_bad_point_below_a_good_one_is_a_contradiction(
    verdicts: dict[Point, Verdict], wanted: set[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    found = find_contradictions(make_axes([3, 2]), verdicts)
    assert {(pair.bad, pair.good) for pair in found} == wanted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.randoms())
def test_whatever_is_answered_the_search_ends_and_what_it_names_was_seen(sizes: list[int], chance: Random) -> None:
    axes = make_axes(sizes)
    last = tuple(size - 1 for size in sizes)

    def answer(point: Point) -> Answer:
        kinds = list(Verdict)
        return Answer(verdict=BAD if point == last else GOOD if not any(point) else chance.choice(kinds), reason="so")

    found = drive(search(axes), answer)
    verdicts = {point.choices: point.verdict for point in found.points}
    assert found.culprits
    for turn in (turn for culprit in found.culprits for turn in culprit.turns):
        corner = dict(turn.held)
        place = [corner.get(axis.name, turn.first_bad[-1]) for axis in axes]
        assert verdicts[tuple(place)] is BAD
        if turn.last_good and turn.last_good != "v0":
            place[[axis.name for axis in axes].index(turn.axis)] = turn.last_good
            assert verdicts[tuple(place)] is GOOD


@pytest.mark.parametrize("sizes", [[1], [1, 1], [2] * 5])
def test_too_few_and_too_many_axes_are_refused(sizes: list[int]) -> None:
    axes = tuple(Axis(name=f"a{at}", values=tuple(map(str, range(size)))) for at, size in enumerate(sizes))
    with pytest.raises(ValueError, match="axes have more than one value"):
        search(axes)


def test_an_axis_of_one_value_is_held() -> None:
    found = find([1, 7], Truth(({1: 3},)))
    (turn,) = found.culprits[0].turns
    assert (turn.axis, turn.held, turn.first_bad) == ("cudnn", {"te": "v0"}, ("v3",))
    assert found.innocent == ()


def test_the_same_answers_lead_to_the_same_points() -> None:
    one, other = Truth(({0: 9, 1: 2},), seed=1, flaky=0.1), Truth(({0: 9, 1: 2},), seed=1, flaky=0.1)
    trust = Trust(0.1)
    assert find([20, 5], one, trust) == find([20, 5], other, trust)
    assert list(one.asked.items()) == list(other.asked.items())
