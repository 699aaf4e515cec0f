"""The low-precision scope, its zones and regions, on the native path and on the double of Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megacpp_validate.bridge import fp8_scope
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.amax_owner import SINGLE_OWNER
from megacpp_validate.bridge.errors import BridgeError, ScopeEnteredTwice, WrongTarget
from megacpp_validate.bridge.fp8_scope import (
    AmaxRegionMisplaced,
    PrecisionScope,
    WrongZone,
    Zones,
    amax_shared_with,
    current_scope,
    group_scope,
    high_precision,
)
from megacpp_validate.bridge.te_fp8 import te_scope, te_state
from tests.bridge.scope_paths import low, off_by, with_the_recipes_of

# --- what is on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_what_the_device_lacks_is_refused_before_anything_is_turned(on_te: None, name: str) -> None:
    """Transformer Engine raises on entry and stays on, 2.12 to 2.20; so it is asked first."""
    with with_the_recipes_of("b200"), pytest.raises(WrongTarget, match=r"10.0 or higher.*Next step"):
        low(recipe=name)
    assert te_state()["enabled"] is False


# --- never silently absent --------------------------------------------------------------------------------


def test_a_target_without_a_recipe_is_a_scope_that_says_so() -> None:
    with low() as scope:
        assert (scope.recipe, scope.is_low, scope.choice.observed) == (None, False, "native")
        assert scope.reason == "the target cpu has no low-precision recipe"
        assert current_scope() is scope
    assert scope.choice.refusals[0].code == "no-recipe"


@pytest.mark.parametrize(
    ("variable", "code"),
    [
        ("MEGACPP_DISABLE_TE", "te-unavailable"),
        ("MEGACPP_DISABLE_TE_FP8_SCOPE", "switched-off"),
        ("MEGACPP_DISABLE_TE_PRODUCTION", "switched-off"),
    ],
)
def test_what_is_switched_off_is_recorded(on_te: None, variable: str, code: str) -> None:
    with off_by(variable), low() as scope:
        assert (scope.recipe, scope.is_low) == ("delayed", False)
        assert [refusal.code for refusal in scope.choice.refusals] == [code]
        assert variable in scope.reason
        if code != "te-unavailable":
            assert te_state()["enabled"] is False


# --- entered once -----------------------------------------------------------------------------------------


def test_a_second_entry_names_both_places_and_leaves_the_first_on(either: str) -> None:
    with low() as scope:
        with pytest.raises(ScopeEnteredTwice, match=r"(?s)(test_fp8_scope.py:\d+.*){2}"), low():
            pytest.fail("entered twice")
        assert current_scope() is scope


@pytest.mark.parametrize("calibrating", [False, True])
def test_a_scope_of_somebody_else_is_seen(on_te: None, calibrating: bool) -> None:
    recipe = fp8_scope.te_delayed_scaling()
    theirs = te_scope(enabled=True, recipe=recipe, amax_reduction_group=None)
    if calibrating:
        theirs = te.autocast.require()(enabled=False, calibrating=True, recipe=recipe)
    with theirs, pytest.raises(ScopeEnteredTwice, match="own scope is on"), low():
        pytest.fail("entered twice")
    assert current_scope() is None


# --- threads and generators -------------------------------------------------------------------------------


def in_a_thread(work: Callable[[], object]) -> object:
    """What it gives, or raises."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        return done.exception() or done.result()


def entered() -> str:
    with low() as scope:
        return scope.choice.observed


def entered_high() -> str:
    with high_precision("another thread") as scope:
        return scope.choice.observed


def high() -> PrecisionScope:
    return high_precision("a projection that stays")


@pytest.mark.parametrize(
    ("outer", "other", "after"), [(low, entered, "te"), (low, entered_high, "native"), (high, entered, "te")]
)
def test_the_state_of_transformer_engine_belongs_to_all_threads(
    on_te: None, outer: Callable[[], PrecisionScope], other: Callable[[], str], after: str
) -> None:
    """Another thread would turn it on or off under this one, and back with no scope open."""
    with outer() as scope:
        before = te_state()["enabled"]
        refusal = in_a_thread(other)
        assert te_state()["enabled"] is before
    assert isinstance(refusal, ScopeEnteredTwice)
    assert scope.entered_at in str(refusal)
    assert "MainThread" in str(refusal)
    assert in_a_thread(other) == after  # and is free afterwards


def test_a_generator_that_yields_inside_its_scope_is_seen(either: str) -> None:
    def steps() -> Iterator[int]:
        with low():
            yield 1

    running = steps()
    next(running)
    with pytest.raises(ScopeEnteredTwice, match="generator"), low():
        pytest.fail("entered twice")
    running.close()
    with low():
        pass


def test_scopes_left_in_the_wrong_order_are_all_closed_and_told(either: str) -> None:
    """Planted: the inner scope is held by a generator; closing it later must not turn the outer one on again."""

    def steps() -> Iterator[int]:
        with high_precision("a generator"):
            yield 1

    running = steps()
    with pytest.raises(BridgeError, match=r"was left while the one entered inside it.*Next step"), low():
        next(running)
    assert current_scope() is None
    running.close()
    assert current_scope() is None
    if either == "te":
        assert te_state()["enabled"] is False


IMPOSSIBLE: list[Callable[[], object]] = [
    lambda: group_scope([], Zones(4), []),
    lambda: group_scope([1, 2], Zones(4), [low]),
    lambda: group_scope([9], Zones(4), [low]),
    lambda: Zones(4, -1, 0),
    lambda: Zones(4, 0, -1),
    lambda: Zones(-1, 0, 0),
    lambda: Zones(4, 3, 2),
]


@pytest.mark.parametrize("make", IMPOSSIBLE)
def test_zones_and_groups_that_there_cannot_be(make: Callable[[], object]) -> None:
    with pytest.raises(WrongZone, match="Next step"):
        make()


def in_another_thread() -> None:
    with low(), ThreadPoolExecutor(1) as pool:
        pool.submit(amax_shared_with, SINGLE_OWNER).result()


def in_high_precision() -> None:
    with low(), high_precision("a head"), amax_shared_with(SINGLE_OWNER):
        pytest.fail("entered")


def twice() -> None:
    with low(), amax_shared_with(SINGLE_OWNER), amax_shared_with(SINGLE_OWNER):
        pytest.fail("entered")


def made_in_an_earlier_scope() -> None:
    with low():
        region = amax_shared_with(SINGLE_OWNER)
    with low(), region:
        pytest.fail("entered")


@pytest.mark.parametrize(("enter", "said"), [
    (lambda: amax_shared_with(SINGLE_OWNER), "outside of every scope"),
    (in_another_thread, "outside of every scope of this thread"),
    (in_high_precision, r"inside the one entered at .*test_fp8_scope.py:\d+"),
    (twice, r"entered at .*test_fp8_scope.py:\d+ inside the one entered at .*test_fp8_scope.py:\d+"),
    (made_in_an_earlier_scope, "inside another scope than it was made in"),
])  # fmt: skip
def test_a_region_out_of_place_is_refused(either: str, enter: Callable[[], None], said: str) -> None:
    with pytest.raises(AmaxRegionMisplaced, match=said + r".*Next step: enter low_precision first"):
        enter()
    assert current_scope() is None
