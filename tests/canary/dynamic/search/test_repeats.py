"""Runs that may be wrong: how often a point is repeated, how sure the answer is, and what is said of it."""

from __future__ import annotations

import math

import pytest

from megacpp_validate.canary.dynamic.bisect_result import Answer, SearchEnd, Verdict
from megacpp_validate.canary.dynamic.search.bound import least_runs
from megacpp_validate.canary.dynamic.search.repeats import Trust
from megacpp_validate.canary.dynamic.search.search import Point, search
from tests.canary.dynamic.search.culprits import Truth, drive, find, make_axes, turns_of


@pytest.mark.parametrize("flaky", [-0.1, 0.5, 1.0])
def test_a_rate_that_says_nothing_is_refused(flaky: float) -> None:
    with pytest.raises(ValueError, match="state a rate below"):
        Trust(flaky)


@pytest.mark.parametrize(
    ("flaky", "error", "points", "lead"),
    [
        (0.0, 0.01, 8, 1),
        (0.05, 0.01, 1, 2),
        (0.05, 0.01, 8, 3),
        (0.2, 0.01, 1, 4),
        (0.2, 0.01, 8, 5),
        (0.45, 0.01, 8, 34),
    ],
)
def test_the_lead_is_the_smallest_that_is_sure_enough(flaky: float, error: float, points: int, lead: int) -> None:
    trust = Trust(flaky, error)
    assert trust.needed_lead(points) == lead
    assert trust.chance_wrong(lead) <= error / points
    assert not flaky or trust.chance_wrong(lead - 1) > error / points


def test_without_a_stated_rate_no_point_is_run_twice() -> None:
    truth = Truth(({0: 9},), flaky=0.3, seed=3)
    find([40], truth)
    assert set(truth.asked.values()) == {1}


@pytest.mark.parametrize("flaky", [0.05, 0.2])
def test_the_answer_is_right_as_often_as_it_says(flaky: float) -> None:
    """Of 400 searches the wrong ones are counted; more than 11 have a chance below 1 in 700 at the stated 1 %."""
    trust, wrong, runs = Trust(flaky, 0.01), 0, 0
    for seed in range(400):
        turn = 1 + seed % 29
        truth = Truth(({0: turn},), flaky=flaky, seed=seed)
        found = find([30], truth, trust)
        right = found.end is SearchEnd.FOUND and turns_of(found) == {
            frozenset({"te"}): {"te": (f"v{turn - 1}", (f"v{turn}",))}
        }
        wrong += not right
        runs += truth.runs
        assert found.confidence >= 0.98
        assert len(truth.asked) <= math.ceil(math.log2(30)) + 2
    assert wrong <= 11
    assert runs / 400 >= least_runs([30], trust)


@pytest.mark.parametrize("flaky", [0.2, 0.3])
@pytest.mark.parametrize("turns", [{0: 17, 1: 4}, {0: 17, 1: 4, 2: 9, 3: 22}])
def test_axes_that_are_bad_together_are_told_with_the_error_that_was_allowed(
    turns: dict[int, int], flaky: float
) -> None:
    """More points carry such an answer than one axis has, so each of them has to be surer."""
    for seed in range(10):
        found = find([30] * len(turns), Truth((turns,), flaky=flaky, seed=seed), Trust(flaky, 0.01))
        assert found.confidence >= 0.99


def test_a_point_whose_runs_disagree_is_told_with_its_counts() -> None:
    found = find([30], Truth(({0: 12},), flaky=0.2, seed=5), Trust(0.2))
    torn = [point for point in found.points if point.is_flaky]
    assert torn
    assert all(point.good and point.bad and point.wrong < 0.01 for point in torn)


def test_a_point_that_is_a_coin_is_given_up_and_called_flakier_than_stated() -> None:
    def answer(point: Point) -> Answer:
        seen[point] = seen.get(point, 0) + 1
        bad = seen[point] % 2 if point == (4,) else point[0] > 5
        return Answer(verdict=Verdict.BAD if bad else Verdict.GOOD)

    seen: dict[Point, int] = {}
    trust = Trust(0.05)
    found = drive(search(make_axes([10]), trust), answer)
    assert seen[(4,)] == trust.most_runs(trust.needed_lead(6))
    coin = next(point for point in found.points if point.choices == ("v4",))
    assert coin.verdict is Verdict.CANNOT_TELL
    assert f"{coin.good} good and {coin.bad} bad" in coin.reason
    assert found.unlike_stated == (("v4",),)


def test_an_end_that_is_a_coin_ends_the_search() -> None:
    count = 0

    def answer(_: Point) -> Answer:
        nonlocal count
        count += 1
        return Answer(verdict=Verdict.BAD if count % 2 else Verdict.GOOD)

    assert drive(search(make_axes([10]), Trust(0.05)), answer).end is SearchEnd.END_UNTOLD


def test_more_disagreement_than_stated_is_said() -> None:
    said = {(0,): "g" * 9, (9,): "b" * 9, (4,): "gbgbgbbbb"}
    runs = {point: iter(text) for point, text in said.items()}

    def answer(point: Point) -> Answer:
        letter = next(runs[point]) if point in runs else "gb"[point[0] > 4]
        return Answer(verdict=Verdict.BAD if letter == "b" else Verdict.GOOD)

    found = drive(search(make_axes([10]), Trust(0.01)), answer)
    assert found.unlike_stated == (("v4",),)
    assert (found.points[2].good, found.points[2].bad) == (3, 5)


def test_what_cannot_be_built_is_not_asked_for_again() -> None:
    truth = Truth(({0: 12},), lambda p: Verdict.CANNOT_BUILD if p == (15,) else None, flaky=0.1, seed=2)
    find([30], truth, Trust(0.1))
    assert truth.asked[(15,)] <= 1


def test_the_bound_grows_with_what_there_is_to_tell() -> None:
    sure, noisy = Trust(), Trust(0.2)
    assert math.ceil(least_runs([30], sure)) == 7
    assert least_runs([30], sure) < least_runs([30, 30], sure) < least_runs([30, 30], sure, together=2)
    assert least_runs([30], noisy) > 3 * least_runs([30], sure)
    assert least_runs([2], sure) == 2
