"""Sessions, runs of many cells and the loss gate: no red is left out, and nothing without evidence looks good."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.environments.host_session import ParityResult, SmokeSession
from megacpp_validate.environments.matrix import MatrixCell, MatrixPlan, MatrixRun, PlannedCell
from megacpp_validate.errors import Exit
from megacpp_validate.evidence.receipt import Check, Outcome, Part
from megacpp_validate.gate.fp8 import Fp8Result
from megacpp_validate.gate.loss import LossOutcome, LossVerdict, judge_folder
from megacpp_validate.report.describe.session import (
    describe_losses,
    describe_matrix,
    describe_matrix_plan,
    describe_session,
)
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.junit import render_junit
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.render.terminal import render_terminal
from tests.replay.loss import FAULTS, _made_up
from tests.report.sessions import (
    ALL,
    CLEAN,
    NOTHING,
    REDS,
    session,
)


def show(result: ParityResult | Fp8Result | SmokeSession, *, verbose: bool = False) -> str:
    return render_terminal(describe_session(result), verbose=verbose)


@pytest.mark.parametrize("result", [ALL, CLEAN, NOTHING], ids=["red", "clean", "not-run"])
def test_wording(result: ParityResult, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert show(result, verbose=True) == snapshot


def test_every_cell_is_judged_and_every_red_is_shown() -> None:
    document = describe_session(ALL)
    assert [case.name for case in document.judged()] == [row.probe for row in ALL.receipts]
    tones = {case.name: case.mark.tone for case in document.judged()}
    assert {name for name, tone in tones.items() if tone is Tone.BAD} == {row.probe for row in REDS}
    text = show(ALL)
    for row in REDS:
        assert row.reason.partition(" Next step:")[0][:60] in " ".join(text.split())
    quiet = show(NOTHING)
    assert quiet.count("the target h200 wants sm_90") == 2  # in the summary, and of one probe: one machine, one reason


@pytest.mark.parametrize(
    ("result", "tone", "code"),
    [
        (ALL, Tone.BAD, Exit.CLOSED),
        (CLEAN, Tone.GOOD, Exit.OPEN),
        (NOTHING, Tone.MISSING, Exit.EVIDENCE_MISSING),
        (session(), Tone.MISSING, Exit.EVIDENCE_MISSING),
    ],
)
def test_nothing_but_success_looks_like_success(result: ParityResult, tone: Tone, code: Exit) -> None:
    document = describe_session(result)
    assert document.mark.tone is tone
    assert result.exit is code
    assert ("holds:" in document.summary) == (tone is Tone.GOOD)
    suite = ET.fromstring(render_junit(document))
    green = int(suite.attrib["failures"]) + int(suite.attrib["skipped"]) == 0
    assert green == (tone is Tone.GOOD)


def verdict(recipe: str, outcome: LossOutcome, *failed: str, refusals: tuple[str, ...] = ()) -> LossVerdict:
    checks = tuple(Check(name, False, (Part("size", 0.2, 0.01, False, "twice the spread"),)) for name in failed)
    return LossVerdict(recipe=recipe, outcome=outcome, checks=checks, refusals=refusals)


FOLLOWS = verdict("delayed", LossOutcome.PASS)
STRAYS = verdict("current", LossOutcome.FAIL, "gap.settled.seed0")
UNLIKE = verdict("block", LossOutcome.REFUSED, refusals=("seeds 0 and 1 have no twin",))


@pytest.mark.parametrize(
    ("verdicts", "absent", "tone", "says"),
    [
        ((FOLLOWS,), "", Tone.GOOD, "FP8 holds: 2 pass"),
        ((FOLLOWS, STRAYS), "", Tone.BAD, "gap.settled.seed0"),
        ((FOLLOWS, UNLIKE), "", Tone.MISSING, "seeds 0 and 1 have no twin"),
        ((), "cell-x left no curve of delayed", Tone.MISSING, "cell-x left no curve of delayed"),
    ],
)
def test_fp8_holds_only_where_every_verdict_on_the_loss_does(
    verdicts: tuple[LossVerdict, ...], absent: str, tone: Tone, says: str
) -> None:
    result = Fp8Result(**CLEAN.model_dump(exclude={"schema_id"}), loss=verdicts, loss_missing=absent)
    document = describe_session(result)
    assert document.mark.tone is tone
    assert result.holds == (tone is Tone.GOOD)
    assert says in show(result)
    assert len(document.judged()) == 2 + len(verdicts) + bool(absent)


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
