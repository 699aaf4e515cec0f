"""Both ways to the experts: equal to the formula, and a way that is wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.smoke import dispatch


def looked_at() -> set[str]:
    bench = Bench(Order("smoke_dispatch", "s", Target("cpu", ""), "native", quick=True, stands_on=("permute",)))
    dispatch.probe(bench)
    assert len(bench.checks) == 14
    return {check.name.removeprefix("fp32.") for check in bench.checks if not check.passed}


def test_both_ways_are_the_formula() -> None:
    assert looked_at() == set()


def dropped(out: Any) -> Any:
    return out * (1.0 - (out.new_ones(out.shape[0], 1).cumsum(0) == 7).to(out.dtype))


PLANTED: dict[str, Callable[[Any], Any]] = {
    "doubled": lambda out: 2 * out,
    "a-token-dropped": dropped,
    "tokens-swapped": lambda out: out.roll(1, 0),
}


@pytest.mark.parametrize("way", ["padded", "jagged"])
@pytest.mark.parametrize("wrong", PLANTED.values(), ids=PLANTED)
def test_a_way_that_is_wrong_is_seen(wrong: Callable[[Any], Any], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(dispatch, way)
    monkeypatch.setattr(dispatch, way, lambda given: wrong(right(given)))
    failed = looked_at()
    assert f"{way}.forward" in failed
    assert all(name.startswith(way) for name in failed)
