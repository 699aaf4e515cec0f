"""Regions of another amax group: where there may be one; `probes.fp8.amax_group` holds histories and groups."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from megacpp_validate.bridge.fp8_scope import (
    SINGLE_OWNER,
    AmaxRegionMisplaced,
    amax_shared_with,
    current_scope,
    high_precision,
)
from tests.bridge.scope_paths import low


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
    (in_high_precision, r"inside the one entered at .*test_amax_region.py:\d+"),
    (twice, r"entered at .*test_amax_region.py:\d+ inside the one entered at .*test_amax_region.py:\d+"),
    (made_in_an_earlier_scope, "inside another scope than it was made in"),
])  # fmt: skip
def test_a_region_out_of_place_is_refused(either: str, enter: Callable[[], None], said: str) -> None:
    with pytest.raises(AmaxRegionMisplaced, match=said + r".*Next step: enter low_precision first"):
        enter()
    assert current_scope() is None
