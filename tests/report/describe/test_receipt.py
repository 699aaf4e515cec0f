"""One receipt in words: the closest check, and the next step of every outcome."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp_validate.evidence.receipt import Check, Outcome
from megacpp_validate.report.describe.receipt import describe_next_step, show_worst
from megacpp_validate.report.marks import mark_of
from tests.report.sessions import BACKEND, FAIL, FALLBACK, GOOD, HELD, IMPORT, OUT, check, part, receipt

WORST: dict[str, tuple[tuple[Check, ...], str]] = {
    "nothing": ((), ""),
    "detail-only": ((BACKEND,), ""),
    "the-bound-itself-does-not-count": ((HELD,), "0.50"),
    "over": ((HELD, OUT), "256.17"),
    "not-a-number": ((check("x", part("finite", None, 0.0)),), "inf"),
    "zero-held": ((check("x", part("zero", 0.0, 0.0)),), "0.00"),
    "zero-missed": ((check("x", part("zero", 1e-30, 0.0)),), "inf"),
    "floor-held": ((check("x", part("floor", 4.0, 2.0, at_least=True)),), "0.50"),
    "floor-missed": ((check("x", part("floor", 0.0, 2.0, at_least=True)),), "inf"),
}


@pytest.mark.parametrize(("checks", "shown"), WORST.values(), ids=WORST)
def test_the_closest_check(checks: tuple[Check, ...], shown: str) -> None:
    assert show_worst(replace(GOOD, checks=checks)) == shown


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_mark_and_every_bad_one_a_next_step(outcome: Outcome) -> None:
    assert mark_of(outcome).tone in (("good", "quiet") if outcome.is_good else ("bad", "missing"))
    assert bool(describe_next_step(receipt("attention", outcome))) != outcome.is_good


def test_the_next_step_is_a_command_that_runs_the_cell_again() -> None:
    assert "megacpp-validate parity --target h200 --probes attention --seed 0" in describe_next_step(FAIL)
    assert "MEGACPP_DISABLE_TE=1" in describe_next_step(FAIL)
    assert "fp8 --target h200 --probes fp8_x" in describe_next_step(replace(FAIL, probe="fp8_x"))
    assert "moe-smoke --target h200 --cells smoke_x" in describe_next_step(replace(FAIL, probe="smoke_x"))
    assert "flag off" in describe_next_step(FALLBACK)
    assert describe_next_step(IMPORT) == "upgrade nvidia-cublas"
