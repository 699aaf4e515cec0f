"""A run of many cells in words, and the plan of one."""

from __future__ import annotations

from syrupy.assertion import SnapshotAssertion

from megacpp_validate.environments.matrix import MatrixCell, MatrixPlan, MatrixRun, PlannedCell
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.report.describe.matrix import describe_matrix, describe_matrix_plan
from megacpp_validate.report.render.markdown import render_markdown


def cell(probe: str, outcome: Outcome, **more: object) -> MatrixCell:
    data = {"cell": f"native-cpu-{probe}", "stack": "native", "target": "cpu", "probe": probe, "outcome": outcome}
    return MatrixCell.model_validate({**data, **more})


def run(*cells: MatrixCell) -> MatrixRun:
    return MatrixRun(tool="tool 1", launcher="slurm", folder="receipts", seconds=12.5, cells=cells)


def test_runs_and_plans(snapshot: SnapshotAssertion) -> None:
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
