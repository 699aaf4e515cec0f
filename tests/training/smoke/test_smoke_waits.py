"""How long a step waits: intervals are merged, what runs beside a collective is no wait, and the account adds up."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.training.parallel.goodput import NS, Ledger
from megacpp_validate.training.smoke.rank import _account
from megacpp_validate.training.smoke.trainer import StepWaits, length, measure_waits, merge


def test_intervals_are_merged() -> None:
    assert merge([]) == []
    assert merge([(5, 6), (1, 3), (2, 4), (4, 5)]) == [(1, 6)]
    assert merge([(1, 9), (2, 3), (10, 11)]) == [(1, 9), (10, 11)]
    assert length(merge([(1, 9), (2, 3), (10, 11)])) == 9


def test_only_what_nothing_runs_beside_is_exposed() -> None:
    """A collective from 10 to 30 us, products beside it from 20 to 25 and behind it; the first one overlaps none."""
    seen = measure_waits(7, [(10, 30), (12, 14), (50, 60)], [(0, 10), (20, 25), (30, 40)])
    assert seen.step == 7
    assert seen.communication == pytest.approx(30e-6)
    assert seen.exposed == pytest.approx(25e-6)
    assert seen.busy == pytest.approx(50e-6)
    hidden = measure_waits(0, [(10, 30)], [(0, 40)])
    assert (hidden.exposed, hidden.communication) == (0, pytest.approx(20e-6))


def test_it_is_what_counting_microseconds_gives() -> None:
    drawn = random.Random(0)
    for _ in range(50):
        draws = [[(b := drawn.randrange(60), b + drawn.randrange(1, 20)) for _ in range(5)] for _ in range(2)]
        talk, work = ({at for begin, end in some for at in range(begin, end)} for some in draws)
        seen = measure_waits(0, *draws)
        counted = (len(talk), len(talk - work), len(talk | work))
        assert (seen.communication, seen.exposed, seen.busy) == pytest.approx([one / 1e6 for one in counted])


def account(seconds: list[float], waited: list[float], waits: StepWaits | None = None, device: str = "cpu") -> Any:
    """The account of steps that took so long, on a clock that is given."""
    now = [0]
    ledger = Ledger(began_ns=0, clock=lambda: now[0])
    records = []
    for one in seconds:
        with ledger.step(10):
            now[0] += round(one * NS)
        records.append(SimpleNamespace(seconds=ledger.last_step_seconds))
    trainer: Any = SimpleNamespace(records=records, waited=waited, waits=waits, order=SimpleNamespace(device=device))
    return {name: spent / NS for name, spent in _account(trainer, ledger).phases_ns.items() if spent}


def test_waits_and_compilation_leave_the_steps() -> None:
    """The first step compiles for 2 s and waits 1 s for a rank that compiles longer: that is no compilation here."""
    assert account([4.0, 1.0, 1.2, 1.0], [1.0, 0.0, 0.2, 0.0]) == pytest.approx(
        {"compile": 2.0, "communication wait": 1.2, "step": 4.0}
    )
    assert account([2.0], [0.5]) == pytest.approx({"communication wait": 0.5, "step": 1.5})
    assert account([], []) == {}


def test_a_gpu_waits_as_its_profile_says_and_is_not_guessed_at() -> None:
    profiled = StepWaits(5, 0.4, 0.25, 0.9)
    assert account([1.0, 1.0], [0.9, 0.9], profiled, "cuda") == pytest.approx({"communication wait": 0.5, "step": 1.5})
    assert account([1.0, 1.0], [0.9, 0.9], None, "cuda") == pytest.approx({"step": 2.0})
    # Never more than the steps took.
    assert account([0.1, 0.1], [0, 0], profiled, "cuda") == pytest.approx({"communication wait": 0.2})
