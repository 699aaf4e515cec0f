"""Sessions, runs of many cells and the loss gate: no red is left out, and nothing without evidence looks good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.environments.matrix import MatrixCell, MatrixPlan, MatrixRun, PlannedCell
from megacpp_validate.evidence.receipt import Check, Outcome, Part
from megacpp_validate.gate.fp8 import Fp8Result
from megacpp_validate.gate.loss import LossOutcome, LossVerdict, judge_folder
from megacpp_validate.report.describe.session import (
    describe_losses,
    describe_matrix,
    describe_matrix_plan,
    describe_session,
    tabulate_productivity,
)
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.render.terminal import render_terminal
from tests.replay.loss import FAULTS, _made_up
from tests.report.page import show_all
from tests.report.sessions import ALL, CLEAN, NOTHING, record, session, trained

SESSIONS = {"red": (ALL, Tone.BAD), "clean": (CLEAN, Tone.GOOD), "not-run": (NOTHING, Tone.MISSING),
            "no probe": (session(), Tone.MISSING)}  # fmt: skip


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session(name: str, snapshot: SnapshotAssertion) -> None:
    result, tone = SESSIONS[name]
    document = describe_session(result)
    assert document.mark.tone is tone
    assert show_all(document) == snapshot


def test_productivity_counts_tokens_that_fp8_needs_more() -> None:
    """Twice the speed is worth nothing where twice the tokens lead to the same loss; no loss, no worth."""
    bf16 = replace(record(steps=1000), tokens=1_000_000, tokens_per_second=1000.0)  # ten steps are below 2.15 after 856
    slow = replace(bf16, precision="delayed", tokens=2_000_000, tokens_per_second=2000.0)
    never = replace(bf16, precision="current", steps=bf16.steps[:500])
    rows = tabulate_productivity((run.precision, trained("", 1.0), run) for run in (bf16, slow, never)).rows
    assert [row[1:] for row in rows] == [
        ("bf16", "900,000", "2.150", "856,000", "900,000"),
        ("delayed", "1,800,000", "2.150", "1,712,000", "900,000"),
        ("current", "900,000", "2.150", "", "goal not reached"),
    ]
    alone = replace(slow, model="other")
    assert tabulate_productivity([("", trained("", 1.0), alone)]).rows == ()


def verdict(recipe: str, outcome: LossOutcome, *failed: str, refusals: tuple[str, ...] = ()) -> LossVerdict:
    checks = tuple(Check(name, False, (Part("size", 0.2, 0.01, False, "twice the spread"),)) for name in failed)
    return LossVerdict(recipe=recipe, outcome=outcome, checks=checks, refusals=refusals)


FOLLOWS = verdict("delayed", LossOutcome.PASS)
STRAYS = verdict("current", LossOutcome.FAIL, "gap.settled.seed0")
UNLIKE = verdict("block", LossOutcome.REFUSED, refusals=("seeds 0 and 1 have no twin",))


VERDICTS = {
    "follows": ((FOLLOWS,), Tone.GOOD),
    "strays": ((FOLLOWS, STRAYS), Tone.BAD),
    "unlike": ((FOLLOWS, UNLIKE), Tone.MISSING),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_fp8_holds_only_where_every_verdict_on_the_loss_does(name: str, snapshot: SnapshotAssertion) -> None:
    verdicts, tone = VERDICTS[name]
    result = Fp8Result(**CLEAN.model_dump(exclude={"schema_id"}), loss=verdicts)
    document = describe_session(result)
    assert (document.mark.tone, result.exit == 0) == (tone, tone is Tone.GOOD)
    assert show_all(document) == snapshot


def cell(probe: str, outcome: Outcome, **more: object) -> MatrixCell:
    data = {"cell": f"native-cpu-{probe}", "stack": "native", "target": "cpu", "probe": probe, "outcome": outcome}
    return MatrixCell.model_validate({**data, **more})


def run(*cells: MatrixCell) -> MatrixRun:
    return MatrixRun(tool="tool 1", launcher="slurm", folder="receipts", seconds=12.5, cells=cells)


def test_runs_of_many_cells_and_plans(snapshot: SnapshotAssertion) -> None:
    again = ("node-fail: the node was lost (node n1)",)
    red = run(
        cell("imports", Outcome.PASS, seconds=4.25, node="n0", retries=again),
        cell("permute", Outcome.FAIL, reason="permute.forward is out of its bound", node="n1"),
        cell("attention", Outcome.NOT_RUN, reason="given up"),
    )
    good = run(cell("imports", Outcome.PASS, kept=True))
    lost = run(cell("imports", Outcome.PASS), cell("permute", Outcome.NOT_RUN))
    row = {"stack": "te2.20.2", "target": "h200", "gpus": 4, "seconds": 60.0, "limit_s": 900.0}
    planned = PlannedCell(cell="te2.20.2-h200-x", probe="x", asks=("--time=30", "--gres=gpu:4"), **row)
    plan = MatrixPlan(tool="tool 1", launcher="slurm", folder="receipts", cells=(planned,))
    pages = [*map(describe_matrix, (red, good, lost)), describe_matrix_plan(plan)]
    assert [page.mark.tone.value for page in pages] == ["bad", "good", "missing", "quiet"]
    assert [len(page.judged()) for page in pages] == [3, 1, 2, 0]
    assert "\n\n".join(map(render_markdown, pages)) == snapshot


def test_loss_gate(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    pages = []
    for name, recipe in (("nothing", ""), ("late gap 0.05", "delayed"), ("other data", "delayed")):
        _made_up(FAULTS[name], recipe, (0,))(tmp_path / name)
        result = judge_folder(tmp_path / name / "curves").model_copy(update={"folder": "curves"})
        pages.append(describe_losses(result))
    assert [page.mark.tone.value for page in pages] == ["good", "bad", "missing"]
    assert "\n\n".join(map(render_terminal, pages)) == snapshot
