"""A fault of the smoke run, planted and found by real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.scores import FaultScore
from megacpp_validate.errors import Exit
from tests.command_line import Run, make_run


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return make_run(capfd, monkeypatch, "smoke-faults")


@pytest.mark.thorough
def test_planted_in_one_run(ask: Run, tmp_path: Path) -> None:
    """Real runs on 2 ranks."""
    code, text, _ = ask("--faults", "learning-rate-apart", "--format", "json", "--receipts", str(tmp_path))
    score = FaultScore.model_validate_json(text[text.index("{") :])
    assert code == Exit.OPEN, text
    assert (score.right, len(score.judged), len(score.clean)) == (1, 1, 1)
