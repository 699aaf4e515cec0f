"""A fault of the smoke run, planted and found by real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.scores import FaultScore
from megacpp_validate.errors import Exit
from tests.command_line import make_run


@pytest.mark.thorough
def test_planted_in_one_run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Real runs on 2 ranks."""
    ask = make_run(capfd, monkeypatch, "smoke-faults")
    code, text, _ = ask("--faults", "learning-rate-apart", "--format", "json", "--receipts", str(tmp_path))
    score = FaultScore.model_validate_json(text[text.index("{") :])
    assert code == Exit.OPEN, text
    assert (score.right, len(score.judged), len(score.clean)) == (1, 1, 1)
