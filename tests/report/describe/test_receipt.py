"""One receipt in words: the closest check, and the next step of every outcome; cells over runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.evidence.history import read_history
from megacpp_validate.evidence.receipt import Backend, Check, Outcome
from megacpp_validate.report.describe.receipt import describe_history, describe_receipt, find_fallbacks, show_worst
from megacpp_validate.report.marks import mark_of
from megacpp_validate.report.render.terminal import render_terminal
from tests.report.sessions import BACKEND, FAIL, FALLBACK, GOOD, HELD, IMPORT, OUT, check, part, receipt

EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence"
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
    assert bool(describe_receipt(receipt("attention", outcome)).help) != outcome.is_good


def test_the_next_step_is_a_command_that_runs_the_cell_again() -> None:
    assert "megacpp-validate parity --probes attention --target h200 --seed 0" in describe_receipt(FAIL).help
    assert "MEGACPP_DISABLE_TE=1" in describe_receipt(FAIL).help
    assert "fp8 --probes fp8_x --target h200" in describe_receipt(replace(FAIL, probe="fp8_x")).help
    assert "moe-smoke --cells smoke_x --target h200" in describe_receipt(replace(FAIL, probe="smoke_x")).help
    assert "flag off" in describe_receipt(FALLBACK).help
    assert describe_receipt(IMPORT).help == "upgrade nvidia-cublas"


def test_a_path_that_took_something_else_fell_back() -> None:
    took = (Backend("attention.fa3", "fa3", "sdpa", ("sdpa",), ("fa3: head size 80",)),)
    assert find_fallbacks(replace(GOOD, backends=took)) == took
    assert find_fallbacks(replace(GOOD, requested="native", backends=took)) == ()


def test_history(snapshot: SnapshotAssertion) -> None:
    every = read_history(EVIDENCE / "h200").model_copy(update={"store": "h200"})
    some = read_history(EVIDENCE / "h200", ("*-imports",)).model_copy(update={"store": "h200"})
    pages = [render_terminal(describe_history(every)), render_terminal(describe_history(some, verbose=True))]
    assert "\n\n".join(pages) == snapshot
