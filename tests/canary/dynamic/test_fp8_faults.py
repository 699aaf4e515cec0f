"""Faults of the low-precision stack without a GPU: what is planned, and what comes of receipts."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_validate.canary.dynamic.fp8_fault_plan import CLEAN, judge_fp8_plan, plan_fp8_faults
from megacpp_validate.canary.dynamic.fp8_fault_score import Fp8FaultResult, Fp8FaultScore, Fp8Verdict
from megacpp_validate.canary.dynamic.te_fault_plan import UnknownFault
from megacpp_validate.canary.dynamic.te_fault_verdict import Troubles
from megacpp_validate.catalog.fp8_faults import Fp8Fault
from megacpp_validate.catalog.te_faults import Edit
from megacpp_validate.evidence.receipt import Check, Failure, Outcome, Receipt, cell_id

RELEASE = "2.20.2"
QUICK = CLEAN[True]
RED, GREEN = "fp8_delayed", "fp8_current"


def new_fault(name: str = "fault", **keys: Any) -> Fp8Fault:
    row: dict[str, Any] = {
        "releases": [RELEASE], "says": "wrong", "edit": [Edit(file="a.py", old="x", new="y")], "cells": [RED],
        "checks": ["*.scale"], "green": GREEN,
    }  # fmt: skip
    return Fp8Fault(id=name, **{**row, **keys})


def new_receipt(probe: str, outcome: Outcome = Outcome.PASS, *failed: str, **keys: Any) -> Receipt:
    checks = (Check("state.steady.input.history", True), *(Check(name, False) for name in failed))
    row: dict[str, Any] = {"reason": "", "requested": "te", "seconds": {"total": 2.0}, "checks": checks, **keys}
    return Receipt(cell_id("te2.20.2", "h200", probe), "te2.20.2", "h200", probe, outcome, **row)


def judge(
    *receipts: Receipt, fault: Fp8Fault | None = None, clean: list[Receipt] | None = None, **troubles: Any
) -> Fp8FaultResult:
    row = fault or new_fault()
    usual = [new_receipt(cell) for cell in (*row.cells, row.green)]
    seen = {
        CLEAN[row.quick]: {one.probe: one for one in (usual if clean is None else clean)},
        f"faults/{row.id}": {one.probe: one for one in receipts},
    }
    (found,) = judge_fp8_plan(plan_fp8_faults([row], RELEASE), seen, Troubles(**troubles))
    return found


# --- the plan ---------------------------------------------------------------------------------------------


def test_a_fault_runs_its_cells_and_the_clean_copy_all_of_them_once() -> None:
    rows = [new_fault("one"), new_fault("two", cells=["fp8_graphs"]), new_fault("three", quick=False)]
    runs = {run.name: run for run in plan_fp8_faults(rows, RELEASE).runs}
    assert list(runs) == ["clean-quick", "clean-whole", "faults/one", "faults/two", "faults/three"]
    assert runs["clean-quick"].cells == (RED, GREEN, "fp8_graphs")
    assert runs["clean-whole"].cells == (RED, GREEN)
    assert runs["faults/two"].cells == ("fp8_graphs", GREEN)
    assert [run.quick for run in runs.values()] == [True, False, True, True, False]
    alone = plan_fp8_faults(rows, RELEASE, ["three"])
    assert [run.name for run in alone.runs] == ["clean-whole", "faults/three"]


@pytest.mark.parametrize(
    ("wanted", "release", "said"),
    [(["nothing"], RELEASE, "no fault 'nothing'"), ([], "1.0.0", "none of these faults is written for")],
)
def test_what_there_is_not_is_refused(wanted: list[str], release: str, said: str) -> None:
    with pytest.raises(UnknownFault, match="Next step") as refused:
        plan_fp8_faults([new_fault()], release, wanted)
    assert said in str(refused.value)


# --- the verdict ------------------------------------------------------------------------------------------

FINE = new_receipt(GREEN)
VERDICTS: dict[str, tuple[list[Receipt], Fp8Verdict, str]] = {
    "the right check": (
        [new_receipt(RED, Outcome.FAIL, "state.spike.input.scale", "shares.spike.input"), FINE], Fp8Verdict.CAUGHT, ""
    ),
    "another check": (
        [new_receipt(RED, Outcome.FAIL, "linear.grad.weight"), FINE], Fp8Verdict.BY_ANOTHER, "red by linear.grad.weight"
    ),
    "an exception": (
        [new_receipt(RED, Outcome.ERROR, failure=Failure("RuntimeError", "no")), FINE],
        Fp8Verdict.BY_ANOTHER, "red by raised RuntimeError",
    ),
    "nothing": ([new_receipt(RED), FINE], Fp8Verdict.MISSED, "fp8_delayed: as in the clean copy"),
    "no receipt": ([FINE], Fp8Verdict.NOT_RUN, "there is no receipt of it"),
    "not run": ([new_receipt(RED, Outcome.NOT_RUN, reason="no torchao"), FINE], Fp8Verdict.NOT_RUN, "no torchao"),
    "killed": ([new_receipt(RED, Outcome.TIMEOUT, reason="too long"), FINE], Fp8Verdict.BY_ANOTHER, "too long"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_a_fault_is_judged(name: str) -> None:
    receipts, verdict, said = VERDICTS[name]
    found = judge(*receipts)
    assert (found.verdict, found.is_alarm) == (verdict, False)
    assert said in found.reason
    assert bool(found.reason) is (verdict is not Fp8Verdict.CAUGHT)


def test_an_exception_can_be_what_must_be_seen() -> None:
    red = new_receipt(RED, Outcome.ERROR, failure=Failure("RuntimeError", "no"))
    assert judge(red, FINE, fault=new_fault(checks=["raised RuntimeError"])).verdict is Fp8Verdict.CAUGHT


def test_each_cell_that_is_named_must_see_it() -> None:
    fault = new_fault(cells=[RED, "fp8_graphs"])
    right = new_receipt(RED, Outcome.FAIL, "state.scale")
    found = judge(right, new_receipt("fp8_graphs"), FINE, fault=fault)
    assert (found.verdict, found.reason) == (Fp8Verdict.BY_ANOTHER, "fp8_graphs stays green")
    found = judge(right, new_receipt("fp8_graphs", Outcome.FAIL, "replay.scale"), FINE, fault=fault)
    assert found.verdict is Fp8Verdict.CAUGHT
    assert found.seconds == 6.0


def test_what_is_off_the_path_must_stay_green() -> None:
    found = judge(new_receipt(RED, Outcome.FAIL, "state.scale"), new_receipt(GREEN, Outcome.FAIL, "linear.forward"))
    assert (found.verdict, found.is_alarm) == (Fp8Verdict.CAUGHT, True)
    assert found.reason == "fp8_current, which must stay green, is red by linear.forward"
    assert not judge(new_receipt(RED, Outcome.FAIL, "state.scale")).is_alarm


def test_a_clean_copy_that_is_red_or_not_there_judges_nothing() -> None:
    red = new_receipt(RED, Outcome.FAIL, "state.scale")
    found = judge(red, FINE, clean=[new_receipt(RED, Outcome.FAIL, "x"), FINE])
    assert (found.verdict, found.green) == (Fp8Verdict.NOT_RUN, None)
    assert "red by itself in fp8_delayed" in found.reason
    assert "no evidence of fp8_current" in judge(red, FINE, clean=[new_receipt(RED)]).reason
    absent = new_receipt(GREEN, Outcome.NOT_RUN, reason="no GPU")
    assert "no evidence of fp8_current: no GPU" in judge(red, FINE, clean=[new_receipt(RED), absent]).reason


def test_troubles_are_told_as_what_they_are() -> None:
    red = new_receipt(RED, Outcome.FAIL, "state.scale")
    stale = judge(red, FINE, not_planted={"faults/fault": "no such lines"})
    assert (stale.verdict, stale.reason) == (Fp8Verdict.NOT_PLANTED, "no such lines")
    assert judge(red, FINE, not_run={"faults/fault": "disk full"}).verdict is Fp8Verdict.NOT_RUN
    nothing = judge(everything="not-run: no GPU", clean=[])
    assert (nothing.verdict, nothing.reason) == (Fp8Verdict.NOT_RUN, "not-run: no GPU")


# --- the score --------------------------------------------------------------------------------------------


def new_score(*rows: Fp8FaultResult) -> Fp8FaultScore:
    return Fp8FaultScore(tool="t", target="h200", environment="e", held_out=False, faults=rows)


@pytest.mark.parametrize("verdict", list(Fp8Verdict))
def test_only_caught_is_good(verdict: Fp8Verdict) -> None:
    row = judge(new_receipt(RED, Outcome.FAIL, "state.scale"), FINE).model_copy(update={"verdict": verdict})
    score = new_score(row)
    assert (score.breaks or score.lacks) is (verdict is not Fp8Verdict.CAUGHT)
    assert score.lacks is (verdict is Fp8Verdict.NOT_RUN)


def test_bounds_are_those_of_wilson_and_count_what_was_judged() -> None:
    caught = judge(new_receipt(RED, Outcome.FAIL, "state.scale"), FINE)
    other = judge(new_receipt(RED, Outcome.FAIL, "x"), FINE)
    lost = judge(FINE)
    score = new_score(*[caught] * 40, other, lost)
    assert (score.caught, score.seen, len(score.judged), len(score.quiet)) == (40, 41, 41, 42)
    assert score.seen_bound == pytest.approx(41 / (41 + 1.959964**2))
    assert score.caught_bound < score.seen_bound
    assert score.alarm_bound == pytest.approx(1.959964**2 / (42 + 1.959964**2))


def test_a_green_cell_that_did_not_run_is_evidence_that_lacks() -> None:
    score = new_score(judge(new_receipt(RED, Outcome.FAIL, "state.scale")))
    assert not score.breaks
    assert score.lacks
    assert new_score().lacks
