"""The door of the planted faults: what cannot be is refused, and what another machine is for is not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.scores import FaultScore
from megacpp_validate.errors import Exit
from tests.command_line import Run, make_run


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return make_run(capfd, monkeypatch, "smoke-faults")


def test_a_fault_of_a_gpu_is_not_run_on_the_cpu(ask: Run) -> None:
    code, text, _ = ask("--faults", "wrong-amax-group", "--format", "json")
    assert code == Exit.EVIDENCE_MISSING, text
    (row,) = json.loads(text)["faults"]
    assert row["verdict"] == "elsewhere"
    assert "2 devices of h200 or b200" in row["reason"]


@pytest.mark.thorough
def test_planted_in_one_run(ask: Run, tmp_path: Path) -> None:
    """Real runs on 2 ranks."""
    code, text, _ = ask("--faults", "learning-rate-apart", "--format", "json", "--receipts", str(tmp_path))
    score = FaultScore.model_validate_json(text[text.index("{") :])
    assert code == Exit.OPEN, text
    assert (score.right, len(score.judged), len(score.clean)) == (1, 1, 1)
