"""BF16 zones inside and beside the low-precision scope, and groups of layers that enter it once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import pytest

from megacpp_validate.bridge.errors import ScopeEnteredTwice
from megacpp_validate.bridge.fp8_scope import (
    Scope,
    WrongZone,
    Zones,
    current_scope,
    group_scope,
    high_precision,
    te_state,
)
from tests.bridge.scope_paths import low

Enter = Callable[[], contextlib.AbstractContextManager[Scope]]


def group(layers: list[int | str], zones: Zones, made: list[int]) -> contextlib.AbstractContextManager[Scope]:
    """A group whose factories note the index of whoever is asked."""

    def factory(index: int) -> contextlib.AbstractContextManager[Scope]:
        made.append(index)
        return low()

    return group_scope(layers, zones, [partial(factory, index) for index in range(len(layers))])


def test_a_group_enters_once_with_the_factory_of_index_0(either: str) -> None:
    made: list[int] = []
    with group([3, 4, 5], Zones(8, first=2, last=2), made) as scope:
        assert scope.is_low is (either == "te")
    assert made == [0]


@pytest.mark.parametrize("layers", [[1, 2, 3], [4, 5, 6], [7], [3, "mtp"], ["lm_head"]])
def test_one_layer_in_the_zone_keeps_the_group_out(on_te: None, layers: list[int | str]) -> None:
    made: list[int] = []
    with group(layers, Zones(8, first=2, last=2), made) as scope:
        assert (scope.is_low, scope.recipe) == (False, None)
        assert "BF16" in scope.reason
        assert te_state()["enabled"] is False
    assert made == []


@pytest.mark.parametrize(("layers", "factories"), [([], []), ([1, 2], [low]), ([9], [low])])
def test_a_group_that_there_cannot_be(layers: list[int], factories: list[Enter]) -> None:
    with pytest.raises(WrongZone, match="Next step"):
        group_scope(layers, Zones(4), factories)


def test_high_precision_turns_it_off_inside_and_on_again(on_te: None) -> None:
    with low():
        with high_precision("the router") as scope:
            assert te_state()["enabled"] is False
            assert (scope.is_low, scope.reason) == (False, "the router")
            assert current_scope() is scope
            with high_precision("nests"):
                assert te_state()["enabled"] is False
        assert te_state()["enabled"] is True


def test_a_layer_that_enters_what_its_group_entered_is_refused(either: str) -> None:
    with group([3, 4], Zones(8), []), pytest.raises(ScopeEnteredTwice), low():
        pytest.fail("entered twice")
