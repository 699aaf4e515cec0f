"""The blame score without a GPU: what is planned, and what the blame of a pair is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.blame_score import BlameScore, ControlResult, FaultResult, Verdict
from megacpp_validate.canary.dynamic.te_fault_plan import (
    CLEAN,
    CLEAN_AGAIN,
    CLEAN_TIMED,
    Control,
    Plan,
    UnknownFault,
    plan_score,
)
from megacpp_validate.canary.dynamic.te_fault_verdict import Troubles, Verdicts, judge_control, judge_fault, judge_plan
from megacpp_validate.canary.dynamic.upgrade_result import Culprit, StepResult
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.te_faults import Edit, TeFault, read_te_faults
from megacpp_validate.evidence.receipt import Check, Failure, Machine, Outcome, Receipt, Timing, cell_id
from megacpp_validate.evidence.values import Cause

RELEASE = "2.20.2"
MACHINE = Machine(host="one", gpu="H200", driver="580")


def new_fault(name: str = "fault", **keys: Any) -> TeFault:
    edit = [Edit(file="a.py", old="x", new="y")]
    row = {"module": "attention", "cause": Cause.NUMERICS, "releases": [RELEASE], "says": "wrong", "edit": edit}
    return TeFault(id=name, **{**row, **keys})


def new_culprit(module: str, cause: Cause = Cause.NUMERICS, *cascades: str) -> Culprit:
    return Culprit(module=module, cause=cause, signature="s", summary="s", next_step="n", cascades=cascades)


def new_step(*culprits: Culprit, lost: dict[str, str] | None = None) -> StepResult:
    return StepResult(target="h200", before="a", after="b", modules=(), culprits=culprits, lost=lost or {})


# --- the plan ---------------------------------------------------------------------------------------------


def test_shards_together_are_the_whole_and_share_what_is_timed(catalog: Catalog) -> None:
    faults = read_te_faults(module.id for module in catalog.modules)
    whole = plan_score(faults, RELEASE, controls=5, timed_controls=3)
    parts = [plan_score(faults, RELEASE, shard=(one, 3), controls=5, timed_controls=3) for one in (1, 2, 3)]
    ids = [row.id for part in parts for row in part.faults]
    assert sorted(ids) == sorted(row.id for row in whole.faults)
    assert [row.id for row in whole.faults] == [row.id for row in faults if RELEASE in row.releases]
    names = [row.name for part in parts for row in part.controls]
    assert sorted(names) == sorted(row.name for row in whole.controls)
    timed = [sum(row.times for row in part.faults) for part in parts]
    assert max(timed) - min(timed) <= 1
    assert len({row.seed for row in whole.controls} | {whole.seed}) == 9, "each clean pair is a draw of its own"


@pytest.mark.parametrize(
    ("wanted", "shard", "release", "said"),
    [
        (["nothing"], (1, 1), RELEASE, "no fault 'nothing'"),
        ([], (3, 2), RELEASE, "no shard 3 of 2"),
        ([], (0, 0), RELEASE, "no shard 0 of 0"),
        ([], (1, 1), "1.0.0", "no fault is written for Transformer Engine 1.0.0"),
        (["other"], (1, 1), RELEASE, "is not written for 2.20.2"),
    ],
)
def test_what_there_is_not_is_refused(wanted: list[str], shard: tuple[int, int], release: str, said: str) -> None:
    faults = [new_fault(), new_fault("other", releases=["2.12.0"])]
    with pytest.raises(UnknownFault, match="Next step") as refused:
        plan_score(faults, release, wanted, shard=shard)
    assert said in str(refused.value)


def test_a_fault_runs_beside_a_clean_run_of_its_own_kind() -> None:
    rows = [new_fault(), new_fault("slow", times=True, cause=Cause.PERFORMANCE)]
    plan = plan_score(rows, RELEASE, controls=1, timed_controls=1, seed=7)
    runs = {run.name: run for run in plan.runs}
    assert list(runs) == [
        CLEAN, CLEAN_TIMED, CLEAN_AGAIN, "faults/fault", "faults/slow", "controls/control-1",
        "controls/control-timed-1",
    ]  # fmt: skip
    assert {run.against for run in plan.runs} <= {"", *runs}
    assert (runs["faults/fault"].against, runs["faults/slow"].against) == (CLEAN, CLEAN_TIMED)
    timed = {CLEAN_TIMED, CLEAN_AGAIN, "faults/slow", "controls/control-timed-1"}
    assert {name for name, run in runs.items() if run.times} == timed
    assert [name for name, run in runs.items() if not run.copied] == [CLEAN, CLEAN_TIMED, CLEAN_AGAIN]
    alone = plan_score(rows, RELEASE, ["slow"])
    assert [run.name for run in alone.runs] == [CLEAN_TIMED, CLEAN_AGAIN, "faults/slow"]
    assert [run.name for run in plan_score(rows, RELEASE, ["fault"]).runs] == [CLEAN, "faults/fault"]


# --- the verdict ------------------------------------------------------------------------------------------

RIGHT, WRONG = new_culprit("attention", Cause.NUMERICS, "native_block"), new_culprit("permute")
ENVIRONMENT = new_culprit("environment", Cause.ENVIRONMENT)
VERDICTS = {
    "right, with a cascade": ({}, new_step(RIGHT), Verdict.RIGHT),
    "another module": ({}, new_step(WRONG), Verdict.WRONG_MODULE),
    "the environment": ({}, new_step(ENVIRONMENT), Verdict.WRONG_MODULE),
    "a second culprit": ({}, new_step(RIGHT, WRONG), Verdict.OTHERS_TOO),
    "another class": ({}, new_step(new_culprit("attention", Cause.API)), Verdict.WRONG_CAUSE),
    "a class that is right as well": (
        {"accepts": [Cause.API]}, new_step(new_culprit("attention", Cause.API)), Verdict.RIGHT,
    ),
    "a name that is right as well": (
        {"also": ["environment"], "cause": Cause.ENVIRONMENT}, new_step(ENVIRONMENT), Verdict.RIGHT,
    ),
    "one fault told twice": (
        {"also": ["environment"], "accepts": [Cause.ENVIRONMENT]}, new_step(RIGHT, ENVIRONMENT), Verdict.OTHERS_TOO,
    ),
    "nobody": ({}, new_step(), Verdict.MISSED),
    "nobody, and evidence is lost": ({}, new_step(lost={"cell": "killed"}), Verdict.NOT_RUN),
    "no step": ({}, None, Verdict.NOT_RUN),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_a_fault_is_judged(name: str) -> None:
    keys, step, verdict = VERDICTS[name]
    found = judge_fault(new_fault(**keys), RELEASE, step)
    assert found.verdict is verdict
    assert bool(found.reason) is (verdict is not Verdict.RIGHT)


def test_an_edit_that_does_not_fit_is_no_pass() -> None:
    found = judge_fault(new_fault(), RELEASE, None, trouble="no such lines", planted=False)
    assert (found.verdict, found.reason, found.was_judged) == (Verdict.NOT_PLANTED, "no such lines", False)


def test_a_clean_pair_that_names_somebody_is_a_false_blame() -> None:
    control = Control("control-1", 1, timed=False)
    assert judge_control(control, RELEASE, new_step()) == judge_control(control, RELEASE, new_step(lost={}))
    assert judge_control(control, RELEASE, new_step(RIGHT)).culprits
    assert judge_control(control, RELEASE, new_step(lost={"cell": "killed"})).reason
    assert judge_control(control, RELEASE, None, trouble="stopped").reason == "stopped"


# --- the whole, through the real blame --------------------------------------------------------------------


def new_run(catalog: Catalog, *, factor: float = 0.0, **red: Receipt) -> dict[str, Receipt]:
    """Receipts of every module: good ones, timed where `factor` is given, but those that are red."""
    found = {}
    for module in catalog.modules:
        rounds = tuple(factor * (1.0 + step / 1000) for step in range(5))
        timings = (Timing("bf16.use", "cuda-events", rounds, rounds[2], 0.004, 9),) if factor else ()
        found[module.id] = red.get(module.id) or new_receipt(module.id, Outcome.PASS, timings=timings)
    return found


def new_receipt(probe: str, outcome: Outcome, *checks: Check, **keys: Any) -> Receipt:
    row: dict[str, Any] = {"reason": "", "requested": "te", "machine": MACHINE, "seconds": {"total": 2.0}, **keys}
    made = checks or (Check("forward", outcome is Outcome.PASS),)
    return Receipt(cell_id("te2.20.2", "h200", probe), "te2.20.2", "h200", probe, outcome, checks=made, **row)


def judge(catalog: Catalog, plan: Plan, seen: dict[str, dict[str, Receipt]], troubles: Troubles | None = None) -> Any:
    return judge_plan(plan, seen, catalog.modules, troubles or Troubles())


def test_a_cascade_is_no_second_culprit(catalog: Catalog) -> None:
    plan = plan_score([new_fault()], RELEASE, controls=1)
    wrong = Check("bf16.gqa4.d64.forward", passed=False)
    red = {
        "attention": new_receipt("attention", Outcome.FAIL, wrong),
        "native_block": new_receipt("native_block", Outcome.FAIL, Check("bf16.case.forward", passed=False)),
    }
    clean = new_run(catalog)
    seen = {CLEAN: clean, "faults/fault": new_run(catalog, **red), "controls/control-1": new_run(catalog)}
    verdicts = judge(catalog, plan, seen)
    assert [row.verdict for row in verdicts.faults] == [Verdict.RIGHT]
    assert verdicts.faults[0].culprits[0].cascades == ("native_block",)
    assert verdicts.faults[0].seconds == 14.0
    assert [(row.culprits, row.reason) for row in verdicts.controls] == [((), "")]


def test_an_import_error_blames_one_module(catalog: Catalog) -> None:
    said = "No module named 'transformer_engine.pytorch.permutation'"
    failure = Failure("ModuleNotFoundError", said, "transformer_engine/pytorch/__init__.py:30 in <module>")
    cell = cell_id("te2.20.2", "h200", "imports")
    red = {
        module.id: new_receipt(module.id, Outcome.BLOCKED, reason=f"blocked by {cell}: {said}", blocked_by=cell)
        for module in catalog.modules
    }
    red["imports"] = new_receipt("imports", Outcome.IMPORT_ERROR, reason=said, failure=failure)
    plan = plan_score([new_fault(module="imports", cause=Cause.API)], RELEASE)
    verdicts = judge(catalog, plan, {CLEAN: new_run(catalog), "faults/fault": new_run(catalog, **red)})
    assert [(row.verdict, row.reason) for row in verdicts.faults] == [(Verdict.RIGHT, "")]


def test_what_is_slow_is_seen_beside_the_noise_of_the_card(catalog: Catalog) -> None:
    slow = new_fault("slow", times=True, cause=Cause.PERFORMANCE)
    plan = plan_score([slow], RELEASE, timed_controls=1)
    first, again, control = (new_run(catalog, factor=factor) for factor in (1.0, 1.002, 1.003))
    sleepy = new_run(catalog, factor=1.0)
    sleepy["attention"] = replace(new_run(catalog, factor=6.0)["attention"])
    seen = {CLEAN_TIMED: first, CLEAN_AGAIN: again, "faults/slow": sleepy, "controls/control-timed-1": control}
    verdicts = judge(catalog, plan, seen)
    assert [(row.verdict, row.reason) for row in verdicts.faults] == [(Verdict.RIGHT, "")]
    assert not verdicts.controls[0].culprits
    missed = judge(catalog, plan, {**seen, "faults/slow": again})
    assert [row.verdict for row in missed.faults] == [Verdict.MISSED]


@pytest.mark.parametrize("side", [CLEAN, "faults/fault"])
def test_a_missing_cell_is_no_evidence_whatever_the_others_say(catalog: Catalog, side: str) -> None:
    plan = plan_score([new_fault()], RELEASE)
    red = new_receipt("attention", Outcome.FAIL, Check("bf16.gqa4.d64.forward", passed=False))
    seen = {CLEAN: new_run(catalog), "faults/fault": new_run(catalog, attention=red)}
    del seen[side]["layer_spec"]
    (row,) = judge(catalog, plan, seen).faults
    assert row.verdict is Verdict.NOT_RUN
    assert "layer_spec" in row.reason
    not_run = new_receipt("layer_spec", Outcome.NOT_RUN, reason="no GPU")
    (row,) = judge(catalog, plan, {**seen, side: {**seen[side], "layer_spec": not_run}}).faults
    assert row.verdict is Verdict.NOT_RUN


def test_a_clean_copy_that_is_red_judges_nothing(catalog: Catalog) -> None:
    plan = plan_score([new_fault()], RELEASE, controls=1)
    red = new_run(catalog, attention=new_receipt("attention", Outcome.FAIL))
    verdicts = judge(catalog, plan, {CLEAN: red, "faults/fault": red, "controls/control-1": red})
    assert [row.verdict for row in verdicts.faults] == [Verdict.NOT_RUN]
    assert "red by itself in attention" in verdicts.faults[0].reason
    assert verdicts.controls[0].reason


def test_troubles_are_told_as_what_they_are(catalog: Catalog) -> None:
    plan = plan_score([new_fault("a"), new_fault("b"), new_fault("c")], RELEASE, controls=1)
    whole = {run.name: new_run(catalog) for run in plan.runs}
    troubles = Troubles(not_planted={"faults/a": "no such lines"}, not_run={"faults/b": "disk full"})
    found = [(row.verdict, row.reason) for row in judge(catalog, plan, whole, troubles).faults]
    assert found[:2] == [(Verdict.NOT_PLANTED, "no such lines"), (Verdict.NOT_RUN, "disk full")]
    assert found[2][0] is Verdict.MISSED
    nothing = judge(catalog, plan, {}, Troubles(everything="not-run: no GPU"))
    assert {(row.verdict, row.reason) for row in nothing.faults} == {(Verdict.NOT_RUN, "not-run: no GPU")}
    assert nothing.controls[0].reason == "not-run: no GPU"


def test_of_two_runs_the_later_counts_and_every_clean_pair() -> None:
    def ran(verdict: Verdict, *reasons: str) -> Verdicts:
        controls = tuple(ControlResult(name=str(index), release=RELEASE, seed=index, timed=False, reason=reason)
                         for index, reason in enumerate(reasons))  # fmt: skip
        return Verdicts((new_result(verdict),), controls)

    def joined(first: Verdicts, later: Verdicts) -> tuple[Verdict, list[str]]:
        both = first.joined(later)
        return both.faults[0].verdict, [f"{row.name}{row.reason}" for row in both.controls]

    assert joined(ran(Verdict.MISSED), ran(Verdict.RIGHT)) == (Verdict.RIGHT, [])
    assert joined(ran(Verdict.RIGHT), ran(Verdict.MISSED)) == (Verdict.MISSED, []), "a later miss is not hidden"
    assert joined(ran(Verdict.RIGHT, "", "?"), ran(Verdict.NOT_RUN, "", "?")) == (Verdict.RIGHT, ["0", "0", "1?"])
    assert joined(ran(Verdict.NOT_RUN, "", "?"), ran(Verdict.NOT_RUN, "?", "")) == (Verdict.NOT_RUN, ["0", "1"])


# --- the score --------------------------------------------------------------------------------------------


def new_result(verdict: Verdict) -> FaultResult:
    return FaultResult(fault="f", module="attention", cause=Cause.API, release=RELEASE, says="s", verdict=verdict)


def new_score(*verdicts: Verdict) -> BlameScore:
    return BlameScore(
        tool="t", target="h200", environment="e", modules=("attention",), faults=tuple(map(new_result, verdicts))
    )


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_right_is_good(verdict: Verdict) -> None:
    score = new_score(verdict)
    assert (score.breaks or score.lacks) is (verdict is not Verdict.RIGHT)
    assert score.lacks is (verdict is Verdict.NOT_RUN)


def test_nothing_at_all_is_evidence_that_lacks() -> None:
    assert new_score().lacks
    assert new_score().right_bound == 0.0
    assert new_score().false_blame_bound == 1.0


def test_bounds_are_those_of_wilson() -> None:
    score = new_score(*[Verdict.RIGHT] * 40)
    assert score.right_bound == pytest.approx(40 / (40 + 1.959964**2))
    assert new_score(*[Verdict.RIGHT] * 40, Verdict.NOT_RUN).right_bound == score.right_bound


def test_the_matrix_is_read_from_where_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "te_faults.toml").write_text('[[fault]]\nid = "a"\n')
    with pytest.raises(ValueError, match="Next step"):
        read_te_faults([], tmp_path)
