"""Both ways to the experts: equal to the formula, and a way that is wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import jagged_experts
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.smoke import dispatch
from tests.probes.planting import failed


def looked_at() -> set[str]:
    bench = Bench(Order("smoke_dispatch", "s", Target("cpu", ""), "native", quick=True, stands_on=("permute",)))
    dispatch.probe(bench)
    assert len(bench.checks) == 14
    assert {row.path for row in bench.backends} == {"dispatch.padded.permute", "dispatch.jagged.jagged_moe"}
    return {check.name.removeprefix("fp32.") for check in bench.checks if not check.passed}


def test_both_ways_are_the_formula() -> None:
    assert looked_at() == set()


def dropped(out: Any) -> Any:
    return out * (1.0 - (out.new_ones(out.shape[0], 1).cumsum(0) == 7).to(out.dtype))


PLANTED: dict[str, Callable[[Any], Any]] = {"doubled": lambda out: 2 * out, "a-token-dropped": dropped}


@pytest.mark.parametrize("way", ["padded", "jagged"])
@pytest.mark.parametrize("wrong", PLANTED.values(), ids=PLANTED)
def test_a_way_that_is_wrong_is_seen(wrong: Callable[[Any], Any], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(dispatch, way)
    monkeypatch.setattr(dispatch, way, lambda given: wrong(right(given)))
    red = looked_at()
    assert f"{way}.forward" in red
    assert all(name.startswith(way) for name in red)


def test_a_way_without_a_recorded_backend_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "recorded_choices", dict)
    bench = Bench(Order("smoke_dispatch", "s", Target("cpu", ""), "native", quick=True, stands_on=("permute",)))
    dispatch.probe(bench)
    assert failed(bench) == {"padded.parts"}


def shifted(ends: Any) -> Any:
    return torch.cat([ends[:1] - 1, ends[1:]])


MISPLACED: dict[str, Callable[[Any], Any]] = {
    "a-row-at-the-next-expert": lambda order: replace(order, ends=shifted(order.ends)),
    "an-assignment-twice": lambda order: replace(order, order=order.order.clone().index_fill_(
        0, torch.tensor([0]), int(order.order[1]))),
    "rows-turned-round": lambda order: replace(order, order=order.order.flip(0)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", MISPLACED.values(), ids=MISPLACED)
def test_a_sort_that_loses_rows_is_seen(wrong: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = jagged_experts.sort_by_expert
    monkeypatch.setattr(jagged_experts, "sort_by_expert", lambda *given: wrong(right(*given)))
    assert "jagged.forward" in looked_at()


def test_a_wait_for_the_device_is_seen() -> None:
    if not torch.cuda.is_available():
        pytest.skip("not-run: there is no CUDA device")
    one = torch.ones(4, device="cuda")
    assert dispatch.find_waits(lambda: one * 2) == ""
    assert "synchroniz" in dispatch.find_waits(lambda: one.sum().item())
    one.sum().item()  # the mode is off again
    with pytest.raises(RuntimeError, match="something else"):
        dispatch.find_waits(fail)


def fail() -> None:
    raise RuntimeError("something else")
