"""The verb of the policy of low precision: exit codes, and a rule that is taken out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.catalog.policies import POLICY, PRESETS
from tests.command_line import Run, make_run

OPEN, CLOSED, WRONG, NOTHING = 0, 1, 2, 3


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    return make_run(capfd, monkeypatch, "fp8-policy")


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    """A copy of the matrix that a test may damage."""
    return Path(shutil.copytree(matrix_folder(), tmp_path / "matrix"))


def mend(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_preset_that_is_meant_to_run_and_is_refused_closes_it(run: Run, matrix: Path) -> None:
    mend(matrix / PRESETS, "bf16_first = 1", "bf16_first = 0")
    said = run("--matrix", matrix)
    assert said.code == CLOSED
    assert "refused: production" in " ".join(said.out.split())
    assert "the first 0 and the last 1 stay in BF16" in " ".join(said.out.split())


TIED = 'parts = ["token_embedding", "lm_head"]\n'


@pytest.mark.parametrize(
    "edits",
    [
        {TIED: 'parts = ["shared_experts"]\n'},
        {TIED: "", 'kind = "parts"\nrefuses = "FP8 in tied': 'kind = "target-recipe"\nrefuses = "FP8 in tied'},
    ],
    ids=["other parts", "another kind"],
)
def test_a_rule_that_lost_its_tooth_closes_it(run: Run, matrix: Path, edits: dict[str, str]) -> None:
    for old, new in edits.items():
        mend(matrix / POLICY, old, new)
    said = run("--matrix", matrix)
    assert said.code == CLOSED
    words = " ".join(said.out.split())
    assert "not refused: tied-embeddings" in words
    assert "refuses nothing of it tied-embeddings" in words


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (POLICY, 'id = "tied-embeddings"', 'id = "embeddings"', "tied-embeddings"),
        (PRESETS, 'parts = ["mtp_head"]', 'parts = ["mtp"]', "mtp"),
        (PRESETS, 'refused_by = ["routers"]', "expires = 2026-12-01", "expires"),
    ],
)
def test_a_wrong_matrix_is_neither_open_nor_closed(
    run: Run, matrix: Path, file: str, old: str, new: str, said: str
) -> None:
    mend(matrix / file, old, new)
    found = run("--matrix", matrix)
    assert found.code == WRONG
    assert said in found.err


def test_json_tells_the_outcome_of_every_preset(run: Run) -> None:
    told = json.loads(run("--format", "json").out)
    assert told["schema_id"] == "megacpp-validate/fp8-policy/1"
    outcomes = {row["preset"]: row["outcome"] for row in told["presets"]}
    assert outcomes["production"] == "allowed"
    assert outcomes["every-layer"] == "rolled-back"
