"""Scores in words: the committed evidence, and a selftest that is not as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.dynamic.scores import FaultScore
from megacpp_validate.gate.ablation import AblationResult, ArmSeen, FeatureAblation, Verdict
from megacpp_validate.report.describe.scores import describe_ablation, describe_planted
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.render.terminal import render_terminal

EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence"
# File, and what it says: right, judged, false alarms, exit code. As the tool said on 2026-11-23.
FIGURES: dict[str, tuple[int, int, tuple[int, int], int]] = {
    "selftest": (160, 160, (0, 203), 0),
    "blame_score": (96, 96, (0, 8), 0),
    "blame_score_held_out": (28, 35, (0, 0), 1),
    "fp8_faults": (34, 35, (0, 35), 1),
    "fp8_faults_rest": (21, 21, (0, 21), 0),
    "fp8_faults_held_out": (5, 11, (0, 11), 1),
    "smoke_faults": (26, 27, (0, 7), 0),
}


@pytest.mark.parametrize("name", FIGURES)
def test_committed_scores_are_read_with_their_figures(name: str, snapshot: SnapshotAssertion) -> None:
    right, judged, alarms, code = FIGURES[name]
    score = FaultScore.model_validate_json((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))
    assert (score.right, len(score.judged), score.alarms, int(score.exit)) == (right, judged, alarms, code)
    document = describe_planted(score)
    rows = (*score.faults, *score.clean)
    assert (len(document.cases), document.mark.tone is Tone.GOOD) == (len(rows), code == 0)
    if name in ("blame_score_held_out", "smoke_faults", "fp8_faults_held_out"):
        assert render_markdown(document) == snapshot


def test_ablation(snapshot: SnapshotAssertion) -> None:
    same: dict[str, Any] = {"tool": "tool 1", "plain": "without", "off": {}, "on": {}}
    off, on = ArmSeen(loss=3.0, peak_bytes=100), ArmSeen(loss=3.001, peak_bytes=80)
    seen = {
        "arms": {"off": off, "on": on},
        "steps": 4,
        "pairs": ((0.1, 0.11),) * 4,
        "ratio": 1.1,
        "low": 1.08,
        "high": 1.12,
    }
    rows = (
        FeatureAblation(feature="recompute", title="Less memory", verdict=Verdict.TAX, **same, **seen),
        FeatureAblation(feature="mtp", title="A head", reasons=("its process ended by exit 1: no memory",), **same),
    )
    page = describe_ablation(AblationResult(tool="tool 1", features=rows))
    assert render_terminal(page) == snapshot
