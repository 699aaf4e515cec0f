"""The score's own arithmetic, and its runs as text."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megacpp_validate.evidence.receipt import Check, Outcome, Part, Receipt
from megacpp_validate.evidence.selftest import SelftestRun, read_runs, wilson_interval
from megacpp_validate.selftest.tasks import run_line

RECEIPT = Receipt(
    "s-t-p", "s", "t", "p", Outcome.FAIL, "r", "te", checks=(Check("c", False, (Part("f", None, 1.0, False, "d"),)),)
)


# Brown, Cai and DasGupta 2001, "Interval estimation for a binomial proportion": with no hits the upper end is
# z^2 / (n + z^2); the others by hand from the same formula.
@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(0, 200, 0.0, 0.018845), (0, 1, 0.0, 0.793451), (10, 100, 0.055229, 0.174366), (100, 100, 0.963006, 1.0)],
)
def test_wilson(hits: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(hits, trials) == pytest.approx((low, high), abs=2e-6)


def test_a_run_comes_back_from_its_line() -> None:
    run = SelftestRun("a-b", "te", 3, (RECEIPT,), reached=2, seconds=1.5)
    assert read_runs(run_line(run) * 2) == (run, run)


@pytest.mark.parametrize("line", ["", "{", "{}", '{"mutant": "a", "colour": 1}'])
def test_a_line_that_is_no_run_is_refused(line: str) -> None:
    good = run_line(SelftestRun("", "te", 3, (RECEIPT,)))
    with pytest.raises(ValidationError):
        read_runs(good + line + "\n")
