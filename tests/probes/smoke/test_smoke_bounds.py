"""Runs that look too good, and where a run that does not reproduce is off."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.probes.smoke.reproduce import check_follows, reference_of
from megacpp_validate.probes.smoke.train import judge_learning, judge_validation, look_at_audit
from megacpp_validate.training.language import Language
from megacpp_validate.training.smoke.trainer import NEVER_TRAINED_ON
from tests.probes.smoke.test_train_checks import SIZE, failed, left_by, new_bench, run_of


@pytest.mark.parametrize(("last", "passes"), [(2.02, True), (1.99, True), (1.5, False), (0.02, False)])
def test_nothing_scores_better_than_a_perfect_model(last: float, passes: bool) -> None:
    steps = [{"step": n, "loss": last, "perfect": 2.0, "grad_norm": 1.0} for n in range(20)]
    assert judge_learning("plan", steps, SIZE.grammar, SIZE.length, SIZE.batch).passed is passes


def test_an_evaluation_that_is_too_good_is_seen() -> None:
    runs: Any = SimpleNamespace(size=SIZE, bench=new_bench())
    language = Language(SIZE.grammar, seed=0)
    perfect = float(language.surprise(language.batch(NEVER_TRAINED_ON, SIZE.batch, SIZE.length + 1)).mean())
    assert judge_validation("v", {"0": perfect + 1.0, "2": perfect}, runs).passed
    for said in ({}, {"0": 0.0}, {"0": perfect + 1.0, "2": perfect - 0.5}):
        assert not judge_validation("v", said, runs).passed


def test_the_first_layer_and_step_that_are_off_are_named() -> None:
    whole = left_by(0) | {
        "stream_norms": {"layers.0": [1.0] * 10, "layers.1": [2.0] * 10},
        "part_norms": {"layers.0": [0.5] * 10, "layers.1": [0.5] * 10},
    }
    off = copy.deepcopy(whole)
    off["stream_norms"]["layers.1"][4:] = [2.1] * 6
    off["steps"][4]["loss"] *= 2
    reference = reference_of([run_of(whole)] * 3)
    for receipt, said in (
        (off, "step 4, layers.1"),
        ({**whole, "steps": off["steps"]}, "no stream and no gradient of a part is off"),
    ):
        bench = new_bench()
        check_follows(bench, "reproduces", run_of(receipt).trajectory, reference)
        assert bench.checks[-1].detail == said
        assert ("reproduces.first-off" in failed(bench)) is (receipt is off)


@pytest.mark.parametrize(("moe", "passes"), [("bridge", False), ("jagged", True)])
def test_tokens_that_nobody_counted_on_one_rank_are_seen(moe: str, passes: bool) -> None:
    run = run_of(left_by(0) | {"dispatches": 0})
    found = look_at_audit(replace(run, order=replace(run.order, plan={}, forms={"moe": moe})), run.first)
    assert {name: passed for name, passed, _ in found}["tokens"] is passes
