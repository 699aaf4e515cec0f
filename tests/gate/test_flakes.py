"""Flake rates: only the same state that ended both ways flakes, and what is no observation does not count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.evidence.history import HistoryRow
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.selftest import wilson_interval
from megacpp_validate.gate.flakes import rate_flakes

CELL = "te2.20.2-h200-attention"
ROW = HistoryRow(
    "run", CELL, "te2.20.2", "h200", "attention", Outcome.PASS, "", "commit-1", "", "", 1.0, 1.0, 0.0, 0, "", "",
    environment="stack-1",
)  # fmt: skip


def rows(*outcomes: Outcome | None, **changes: str) -> list[HistoryRow]:
    return [replace(ROW, outcome=outcome, **changes) for outcome in outcomes]


def test_one_state_with_both_ends_flakes() -> None:
    rate = rate_flakes(CELL, rows(Outcome.PASS, Outcome.FAIL, Outcome.PASS, Outcome.TIMEOUT))
    assert (rate.flakes, rate.runs, rate.flaky_states, rate.states) == (2, 4, 1, 1)
    assert rate.rate == 0.5
    assert (rate.low, rate.high) == wilson_interval(2, 4)


@pytest.mark.parametrize("field", ["environment", "commit", "image_digest", "lock_hash"])
def test_another_state_is_an_upgrade_and_no_flake(field: str) -> None:
    changed = [*rows(Outcome.PASS, Outcome.PASS), *rows(Outcome.FAIL, Outcome.FAIL, **{field: "another"})]
    rate = rate_flakes(CELL, changed)
    assert (rate.flakes, rate.runs, rate.flaky_states, rate.states) == (0, 4, 0, 2)


def test_always_bad_is_a_breakage_and_once_is_no_repeat() -> None:
    assert rate_flakes(CELL, rows(Outcome.FAIL, Outcome.ERROR)).flakes == 0
    once = rate_flakes(CELL, rows(Outcome.FAIL))
    assert (once.rate, once.runs, once.low, once.high) == (None, 0, 0.0, 1.0)


NOTHING: list[dict[str, object]] = [
    {"outcome": None},
    {"outcome": Outcome.BLOCKED},
    {"outcome": Outcome.NOT_RUN},
    {"outcome": Outcome.FAIL, "same_as": "another"},
    {"outcome": Outcome.FAIL, "contradicts": "another"},
    {"outcome": Outcome.PASS, "only_timed": True},
    {"outcome": Outcome.FAIL, "cell": "te2.20.2-h200-permute"},
]


@pytest.mark.parametrize("change", NOTHING, ids=str)
def test_what_is_no_observation_does_not_count(change: dict[str, object]) -> None:
    good = rows(Outcome.PASS, Outcome.PASS)
    assert rate_flakes(CELL, [*good, replace(ROW, **change)]) == rate_flakes(CELL, good)


def test_what_names_no_state_is_counted_apart() -> None:
    rate = rate_flakes(CELL, [*rows(Outcome.PASS, Outcome.FAIL, commit=""), *rows(Outcome.PASS, environment="")])
    assert (rate.rate, rate.unbound) == (None, 3)


def test_files_that_differed_from_their_commit_name_no_state() -> None:
    """Red, mended, green, all before the commit: nothing flaked."""
    rate = rate_flakes(CELL, rows(Outcome.FAIL, Outcome.PASS, commit=f"{'a' * 40}-dirty"))
    assert (rate.rate, rate.flakes, rate.unbound) == (None, 0, 2)


outcomes = st.sampled_from([Outcome.PASS, Outcome.FAIL, Outcome.BLOCKED, None])


@settings(max_examples=50)
@given(st.lists(st.tuples(outcomes, st.sampled_from("abc")), max_size=12), st.randoms(use_true_random=False))
def test_order_never_matters_and_a_rate_is_a_share(seen: list[tuple[Outcome | None, str]], order: object) -> None:
    made = [replace(ROW, outcome=outcome, commit=commit) for outcome, commit in seen]
    rate = rate_flakes(CELL, made)
    order.shuffle(made)  # type: ignore[attr-defined]  # hypothesis has no public type for it
    assert rate_flakes(CELL, made) == rate
    assert 0 <= rate.flakes <= rate.runs
    assert 0.0 <= rate.low <= rate.high <= 1.0
