"""Planted faults without a GPU: what runs on each copy, and what receipts of a copy are worth."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_validate.canary.dynamic.planting import (
    CLEAN,
    CopyRun,
    choose_faults,
    judge_copies,
    judge_finding,
    plan_copies,
)
from megacpp_validate.canary.dynamic.scores import FaultScore, ScoreRow, Sighting, Verdict
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.planted import Edit, Fp8Fault, TeFault
from megacpp_validate.errors import WrongArguments
from megacpp_validate.evidence.receipt import Check, Failure, Machine, Outcome, Receipt, cell_id
from megacpp_validate.evidence.values import Cause

RELEASE = "2.20.2"
MACHINE = Machine(host="one", gpu="H200", driver="580")
EDIT = [Edit(file="a.py", old="x", new="y")]
RED, GREEN = "fp8_delayed", "fp8_current"


def new_fault(name: str = "fault", **keys: Any) -> TeFault:
    row = {"module": "attention", "cause": Cause.NUMERICS, "releases": [RELEASE], "says": "wrong", "edit": EDIT}
    return TeFault(id=name, **{**row, **keys})


def new_fp8(name: str = "fault", **keys: Any) -> Fp8Fault:
    row = {"releases": [RELEASE], "says": "w", "edit": EDIT, "cells": [RED], "checks": ["*.scale"], "green": GREEN}
    return Fp8Fault(id=name, **{**row, **keys})


def new_receipt(probe: str, outcome: Outcome = Outcome.PASS, *failed: str, **keys: Any) -> Receipt:
    checks = (Check("forward", True), *(Check(name, False) for name in failed))
    row: dict[str, Any] = {"reason": "", "requested": "te", "machine": MACHINE, "seconds": {"total": 2.0}, **keys}
    return Receipt(cell_id("te2.20.2", "h200", probe), "te2.20.2", "h200", probe, outcome, checks=checks, **row)


def new_run(catalog: Catalog, **red: Receipt) -> dict[str, Receipt]:
    """Receipts of every module: good ones, but those that are red."""
    return {row.id: red.get(row.id) or new_receipt(row.id) for row in catalog.modules}


# --- the plan ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "release", "message"),
    [
        (["nothing"], RELEASE, "no fault 'nothing'"),
        ([], "1.0.0", "every fault: not written for Transformer Engine 1.0.0"),
        (["fault", "other"], RELEASE, "other: not written for Transformer Engine 2.20.2"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(wanted: list[str], release: str, message: str) -> None:
    faults = [new_fault(), new_fault("other", releases=["2.12.0"])]
    assert choose_faults(faults, RELEASE, ()) == faults[:1]
    with pytest.raises(WrongArguments, match="Next step") as refused:
        choose_faults(faults, release, wanted)
    assert message in str(refused.value)


def test_a_fault_runs_beside_a_clean_run() -> None:
    plan = plan_copies([new_fault()], controls=1, seed=7)
    assert [(run.name, run.seed) for run in plan] == [(CLEAN, 7), ("faults/fault", 7), ("controls/control-1", 8)]


def test_an_fp8_fault_runs_its_cells_and_the_clean_copy_all_of_them_once() -> None:
    plan = plan_copies([new_fp8("one"), new_fp8("two", cells=["fp8_graphs"])])
    assert [(run.name, run.cells) for run in plan] == [
        (CLEAN, (RED, GREEN, "fp8_graphs")), ("faults/one", (RED, GREEN)), ("faults/two", ("fp8_graphs", GREEN)),
    ]  # fmt: skip


# --- the blame --------------------------------------------------------------------------------------------


def judge(catalog: Catalog, plan: tuple[CopyRun, ...], seen: Any, troubles: Any = None) -> Any:
    return judge_copies(RELEASE, plan, seen, troubles or {}, catalog.modules)


ATTENTION = new_receipt("attention", Outcome.FAIL, "bf16.gqa4.d64.forward")
BLOCK = new_receipt("native_block", Outcome.FAIL, "bf16.case.forward")
PERMUTE = new_receipt("permute", Outcome.FAIL, "bf16.top2.dropped.sum.forward")
BACKEND = new_receipt("attention", Outcome.FAIL, "attention.bf16.gqa4.backend")
VERDICTS: dict[str, tuple[dict[str, Any], tuple[Receipt, ...], Verdict]] = {
    "right, with a cascade": ({}, (ATTENTION, BLOCK), Verdict.RIGHT),
    "another module": ({}, (PERMUTE,), Verdict.WRONG_MODULE),
    "a second culprit": ({}, (ATTENTION, PERMUTE), Verdict.OTHERS_TOO),
    "another class": ({}, (BACKEND,), Verdict.WRONG_CAUSE),
    "a class that is right as well": ({"accepts": [Cause.SILENT_FALLBACK]}, (BACKEND,), Verdict.RIGHT),
    "a name that is right as well": ({"also": ["permute"]}, (PERMUTE,), Verdict.RIGHT),
    "one fault named twice": ({"also": ["permute"]}, (ATTENTION, PERMUTE), Verdict.OTHERS_TOO),
    "nobody": ({}, (), Verdict.MISSED),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_fault_is_judged_by_the_blame(name: str, catalog: Catalog) -> None:
    keys, red, verdict = VERDICTS[name]
    plan = plan_copies([new_fault(**keys)], controls=1)
    copy = new_run(catalog, **{one.probe: one for one in red})
    seen = {CLEAN: new_run(catalog), "faults/fault": copy, "controls/control-1": new_run(catalog)}
    ((row,), controls) = judge(catalog, plan, seen)
    assert (row.verdict, bool(row.reason), row.seconds) == (verdict, verdict is not Verdict.RIGHT, 14.0)
    assert [(one.id, one.verdict) for one in controls] == [("control-1", Verdict.QUIET)]
    if BLOCK in red:
        assert row.seen == (Sighting(by="attention", names=("numerics", "native_block")),)


def test_who_is_blamed_in_a_copy_without_a_fault_is_a_false_alarm(catalog: Catalog) -> None:
    seen = {CLEAN: new_run(catalog), "controls/control-1": new_run(catalog, attention=ATTENTION)}
    plan = (CopyRun(CLEAN), CopyRun("controls/control-1"))
    assert [one.verdict for one in judge(catalog, plan, seen)[1]] == [Verdict.FALSE_ALARM]


@pytest.mark.parametrize("side", [CLEAN, "faults/fault"])
@pytest.mark.parametrize("instead", [None, new_receipt("layer_spec", Outcome.NOT_RUN, reason="no GPU")])
def test_a_missing_cell_is_no_evidence_whatever_the_others_say(
    catalog: Catalog, side: str, instead: Receipt | None
) -> None:
    seen = {CLEAN: new_run(catalog), "faults/fault": new_run(catalog, attention=ATTENTION)}
    del seen[side]["layer_spec"]
    seen[side] |= {"layer_spec": instead} if instead else {}
    ((row,), _) = judge(catalog, plan_copies([new_fault()]), seen)
    assert (row.verdict, "layer_spec" in row.reason) == (Verdict.NOT_RUN, True)


def test_a_copy_that_cannot_be_made_is_not_judged(catalog: Catalog) -> None:
    plan = plan_copies([new_fault("a"), new_fault("b"), new_fault("c")], controls=1)
    whole = {run.name: new_run(catalog) for run in plan}
    troubles = {"faults/a": (Verdict.NOT_PLANTED, "no such lines"), "faults/b": (Verdict.NOT_RUN, "disk full")}
    found = [(row.verdict, row.reason) for row in judge(catalog, plan, whole, troubles)[0]]
    assert found[:2] == list(troubles.values())
    assert found[2][0] is Verdict.MISSED
    faults, (control,) = judge(catalog, plan, {}, {run.name: (Verdict.NOT_RUN, "no GPU") for run in plan})
    assert {(row.verdict, row.reason) for row in faults} == {(Verdict.NOT_RUN, "no GPU")}
    assert (control.verdict, control.reason) == (Verdict.NOT_RUN, "no GPU")


# --- the cells of FP8 -------------------------------------------------------------------------------------

FINE = new_receipt(GREEN)
SCALE = new_receipt(RED, Outcome.FAIL, "state.scale")
GRAPHS = new_fp8(cells=[RED, "fp8_graphs"])
FP8: dict[str, tuple[Fp8Fault, list[Receipt], Verdict, str]] = {
    "the right check": (new_fp8(), [SCALE, FINE], Verdict.CAUGHT, ""),
    "another check": (new_fp8(), [new_receipt(RED, Outcome.FAIL, "grad.weight"), FINE], Verdict.BY_ANOTHER,
                      "red by grad.weight"),
    "an exception": (new_fp8(), [new_receipt(RED, Outcome.ERROR, failure=Failure("RuntimeError", "no")), FINE],
                     Verdict.BY_ANOTHER, "red by raised RuntimeError"),
    "an exception that must be": (
        new_fp8(checks=["raised RuntimeError"]),
        [new_receipt(RED, Outcome.ERROR, failure=Failure("RuntimeError", "no")), FINE], Verdict.CAUGHT, "",
    ),
    "nothing": (new_fp8(), [new_receipt(RED), FINE], Verdict.MISSED, "fp8_delayed: as in the clean copy"),
    "no receipt": (new_fp8(), [FINE], Verdict.NOT_RUN, "there is no receipt of it"),
    "not run": (new_fp8(), [new_receipt(RED, Outcome.NOT_RUN, reason="no torchao"), FINE], Verdict.NOT_RUN, "no torch"),
    "killed": (new_fp8(), [new_receipt(RED, Outcome.TIMEOUT, reason="too long"), FINE], Verdict.BY_ANOTHER, "too long"),
    "one of two cells": (GRAPHS, [SCALE, new_receipt("fp8_graphs"), FINE], Verdict.BY_ANOTHER, "stays green"),
    "both cells": (GRAPHS, [SCALE, new_receipt("fp8_graphs", Outcome.FAIL, "a.scale"), FINE], Verdict.CAUGHT, ""),
}  # fmt: skip


def judge_one(
    fault: Fp8Fault, receipts: list[Receipt], clean: list[Receipt] | None = None, *trouble: tuple[Verdict, str]
) -> tuple[ScoreRow, list[Verdict]]:
    """The row of the fault, and the verdicts on the cell that must stay green."""
    usual = [new_receipt(cell) for cell in (*fault.cells, fault.green)]
    seen = {
        CLEAN: {one.probe: one for one in (usual if clean is None else clean)},
        "faults/fault": {one.probe: one for one in receipts},
    }
    (found,), green = judge_copies(
        RELEASE, plan_copies([fault]), seen, dict(zip(["faults/fault"], trouble, strict=False))
    )
    return found, [row.verdict for row in green]


@pytest.mark.parametrize("name", FP8)
def test_an_fp8_fault_is_judged_by_its_checks(name: str) -> None:
    fault, receipts, verdict, said = FP8[name]
    found, green = judge_one(fault, receipts)
    assert (found.verdict, green, bool(found.reason)) == (verdict, [Verdict.QUIET], verdict is not Verdict.CAUGHT)
    assert said in found.reason


@pytest.mark.parametrize(
    ("receipts", "verdict"),
    [([SCALE, new_receipt(GREEN, Outcome.FAIL, "linear.forward")], Verdict.FALSE_ALARM), ([SCALE], Verdict.NOT_RUN)],
)
def test_what_is_off_the_path_must_stay_green(receipts: list[Receipt], verdict: Verdict) -> None:
    found, green = judge_one(new_fp8(), receipts)
    assert (found.verdict, green) == (Verdict.CAUGHT, [verdict])


@pytest.mark.parametrize(
    ("clean", "trouble", "verdict", "said"),
    [
        ([new_receipt(RED, Outcome.FAIL, "x"), FINE], (), Verdict.NOT_RUN, "red by itself in fp8_delayed"),
        ([new_receipt(RED), new_receipt(GREEN, Outcome.NOT_RUN, reason="no GPU")], (), Verdict.NOT_RUN, "no GPU"),
        (None, ((Verdict.NOT_PLANTED, "no such lines"),), Verdict.NOT_PLANTED, "no such lines"),
    ],
)
def test_without_a_clean_copy_nothing_is_judged(clean: Any, trouble: Any, verdict: Verdict, said: str) -> None:
    found, green = judge_one(new_fp8(), [SCALE, FINE], clean, *trouble)
    assert (found.verdict, green, said in found.reason) == (verdict, [], True)


# --- the smoke run, and the score -------------------------------------------------------------------------

WATCH = Sighting(by="watch", names=("step 2", "ranks 1", "module layers.3"))
OTHER = Sighting(by="reproduce", names=("step 2",))
FINDINGS: dict[str, tuple[tuple[str, ...], tuple[Sighting, ...], Verdict, str]] = {
    "all of it": (("step 2", "ranks 1"), (WATCH,), Verdict.CAUGHT, ""),
    "beside others": (("step 2", "module layers.3"), (OTHER, WATCH), Verdict.CAUGHT, ""),
    "another step": (("step 3",), (WATCH,), Verdict.MISNAMED, "does not name step 3"),
    "one of two ranks": (("ranks 0, 1",), (WATCH,), Verdict.MISNAMED, "does not name ranks 0, 1"),
    "another check": (("step 2",), (OTHER,), Verdict.BY_ANOTHER, "watch found nothing; reproduce did"),
    "nobody": (("step 2",), (), Verdict.MISSED, "no check found anything"),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_is_compared_with_its_row(name: str) -> None:
    names, seen, verdict, said = FINDINGS[name]
    found, reason = judge_finding(Sighting(by="watch", names=names), seen)
    assert (found, said in reason, bool(reason)) == (verdict, True, verdict is not Verdict.CAUGHT)


# Verdicts on faults (with * of held-out ones), verdicts on clean runs, and whether the score breaks and lacks.
SCORES: list[tuple[str, str, bool, bool]] = [
    ("caught right", "quiet", False, False),
    ("caught misnamed", "quiet", True, False),
    ("not-planted", "quiet", True, False),
    ("by-another*", "quiet", False, False),
    ("missed*", "quiet", True, False),
    ("missed", "quiet", True, False),
    ("caught", "quiet false-alarm", True, False),
    ("caught not-run", "quiet", False, True),
    ("caught elsewhere", "quiet", False, False),
    ("elsewhere", "", False, True),
    ("", "", False, True),
]


@pytest.mark.parametrize(("faults", "clean", "breaks", "lacks"), SCORES)
def test_a_score_breaks_and_lacks(faults: str, clean: str, breaks: bool, lacks: bool) -> None:
    rows, runs = (
        tuple(ScoreRow(id="one", where="", verdict=Verdict(word.rstrip("*")), held_out="*" in word) for word in words)
        for words in (faults.split(), clean.split())
    )
    score = FaultScore(tool="t", suite="smoke-faults", target="cpu", environment="here", faults=rows, clean=runs)
    assert (score.breaks, score.lacks) == (breaks, lacks)
