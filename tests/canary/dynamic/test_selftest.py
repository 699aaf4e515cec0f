"""The host's half of the suite's own score: an order from the matrix, and a verdict on each mutant from the runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp_validate.canary.dynamic.scores import FaultScore, Sighting, Verdict
from megacpp_validate.canary.dynamic.selftest import judge_selftest, plan_selftest
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.evidence.receipt import Check, Outcome, Part, Receipt
from megacpp_validate.evidence.selftest import Mutant, SelftestOrder, SelftestRun

FAILED = Check("bf16.forward", False, (Part("factor", 2.0, 0.1, False, ""), Part("finite", 0.0, 0.0, True, "")))


def receipt(probe: str, outcome: Outcome = Outcome.PASS, stack: str = "te") -> Receipt:
    checks = (FAILED,) if outcome is Outcome.FAIL else ()
    return Receipt(f"{stack}-cpu-{probe}", stack, "cpu", probe, outcome, "it says why", "te", checks=checks)


def run(mutant: Mutant | None, catalog: Catalog, **red: Outcome) -> SelftestRun:
    receipts = tuple(receipt(row.id, red.get(row.id, Outcome.PASS)) for row in catalog.modules)
    return SelftestRun(mutant.id if mutant else "", mutant.requested if mutant else "te", 0, receipts, reached=1)


@pytest.fixture
def order(catalog: Catalog) -> SelftestOrder:
    return plan_selftest(catalog, ["attention-zeros"], clean=7)


def judge(catalog: Catalog, order: SelftestOrder, *runs: SelftestRun) -> FaultScore:
    return judge_selftest(catalog, order, runs)


def test_a_killed_mutant_blames_its_module(catalog: Catalog, order: SelftestOrder) -> None:
    red = run(order.mutants[0], catalog, attention=Outcome.FAIL, native_block=Outcome.ERROR)
    result = judge(catalog, order, red, run(None, catalog))
    (mutant,) = result.faults
    assert (mutant.verdict, mutant.seen) == (
        Verdict.RIGHT,
        (Sighting(by="attention", names=("bf16.forward (factor)",)),),
    )
    assert (result.exit, result.caught, result.right, result.alarms) == (0, 1, 1, (0, 7))
    wrong = judge(catalog, order, run(order.mutants[0], catalog, imports=Outcome.FAIL), run(None, catalog))
    assert (wrong.faults[0].verdict, wrong.exit, wrong.caught, wrong.right) == (Verdict.WRONG_MODULE, 1, 1, 0)


def fate_of(catalog: Catalog, order: SelftestOrder, changed: SelftestRun | None) -> tuple[Verdict, str]:
    runs = [run(None, catalog)] + ([changed] if changed else [])
    result = judge(catalog, order, *runs)
    assert result.exit != 0
    return result.faults[0].verdict, result.faults[0].reason


def test_fates_that_are_not_good(catalog: Catalog, order: SelftestOrder) -> None:
    plain = run(order.mutants[0], catalog)
    assert fate_of(catalog, order, plain)[0] is Verdict.MISSED
    assert fate_of(catalog, order, replace(plain, reached=0)) == (
        Verdict.MISSED,
        "no probe runs dot_product_attention, or it changes nothing there",
    )
    gone = replace(plain, planted=False, trouble="the patch point is gone", receipts=())
    assert fate_of(catalog, order, gone) == (Verdict.NOT_PLANTED, "the patch point is gone")
    assert fate_of(catalog, order, None)[0] is Verdict.NOT_RUN
    not_run = run(order.mutants[0], catalog, attention=Outcome.NOT_RUN)
    assert fate_of(catalog, order, not_run)[0] is Verdict.NOT_RUN
    assert fate_of(catalog, order, replace(plain, receipts=(), trouble="exit status -11"))[0] is Verdict.NOT_RUN


def test_a_probe_that_is_red_without_a_fault_kills_nothing(catalog: Catalog, order: SelftestOrder) -> None:
    clean = run(None, catalog, attention=Outcome.FAIL)
    result = judge(catalog, order, clean, run(order.mutants[0], catalog, attention=Outcome.FAIL))
    assert result.faults[0].verdict is Verdict.NOT_RUN
    (alarm,) = (row for row in result.clean if row.verdict is Verdict.FALSE_ALARM)
    assert alarm.id == "te-cpu-attention, seed 0"
    assert alarm.seen == (Sighting(by="attention", names=("bf16.forward (factor)",)),)
    assert (result.alarms, result.exit) == ((1, 7), 1)


def test_clean_runs_that_did_not_come_are_told(catalog: Catalog, order: SelftestOrder) -> None:
    red = run(order.mutants[0], catalog, attention=Outcome.FAIL)
    lost = judge(catalog, order, red, run(None, catalog, permute=Outcome.NOT_RUN))
    assert [(row.id, row.reason) for row in lost.clean if not row.was_judged] == [
        ("te-cpu-permute, seed 0", "it says why")
    ]
    assert (lost.alarms, lost.exit) == ((0, 6), 4)
    died = judge(catalog, order, red, replace(run(None, catalog), receipts=(), trouble="exit status -9"))
    assert [(row.verdict, row.reason) for row in died.clean] == [(Verdict.NOT_RUN, "exit status -9")]
    assert died.exit == 4
