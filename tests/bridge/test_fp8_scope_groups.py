"""BF16 zones inside and beside the low-precision scope, and groups of layers that enter it once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import pytest

from megacpp_validate.bridge.fp8_scope import (
    Scope,
    WrongZone,
    Zones,
    group_scope,
    te_state,
)
from tests.bridge.scope_paths import low


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


@pytest.mark.parametrize(
    ("zones", "wanted"),
    [
        (Zones(6), []),
        (Zones(6, first=2, last=1), [0, 1, 5]),
        (Zones(4, first=2, last=2), [0, 1, 2, 3]),
    ],
)
def test_the_first_and_the_last_layers_stay(zones: Zones, wanted: list[int]) -> None:
    assert [layer for layer in range(zones.num_layers) if zones.is_bf16(layer)] == wanted


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
