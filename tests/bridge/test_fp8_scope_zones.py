"""Which layers stay in BF16, and what a group of them does."""

from __future__ import annotations

import pytest

from megacpp_validate.bridge.fp8_scope import WrongZone, Zones


@pytest.mark.parametrize(
    ("zones", "wanted"),
    [
        (Zones(6), []),
        (Zones(6, first=1), [0]),
        (Zones(6, last=2), [4, 5]),
        (Zones(6, first=2, last=1), [0, 1, 5]),
        (Zones(4, first=2, last=2), [0, 1, 2, 3]),
        (Zones(1, last=1), [0]),
    ],
)
def test_the_first_and_the_last_layers_stay(zones: Zones, wanted: list[int]) -> None:
    assert [layer for layer in range(zones.num_layers) if zones.is_bf16(layer)] == wanted


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ((2, 3), ""),
        ((1, 2), "layer 1 is one of the first 2, which stay in BF16, and a group stays together"),
        ((6, 7, 8), "layer 8 is one of the last 2, which stay in BF16, and a group stays together"),
        ((5, "mtp"), "mtp is an auxiliary head, which stays in BF16, and a group stays together"),
        ((0,), "layer 0 is one of the first 2, which stay in BF16"),
    ],
)
def test_one_layer_keeps_its_group_out(layers: tuple[int, ...], wanted: str) -> None:
    assert Zones(10, first=2, last=2).why_group_is_bf16(layers) == wanted


@pytest.mark.parametrize("counts", [(4, -1, 0), (4, 0, -1), (-1, 0, 0), (4, 3, 2)])
def test_zones_that_there_cannot_be(counts: tuple[int, int, int]) -> None:
    with pytest.raises(WrongZone, match="Next step"):
        Zones(*counts)
