"""The verb of the policy of low precision: exit codes, days, waivers, and a rule that is taken out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.catalog.fp8 import POLICY, PRESETS, WAIVERS
from tests.command_line import Run, make_run

OPEN, CLOSED, WRONG, NOTHING = 0, 1, 2, 3
WAIVER = """
[[waiver]]
rule = "auxiliary-heads"
preset = "{preset}"
owner = "the owner of the head"
reason = "a trial of two weeks"
link = "https://example.org/1"
expires = 2026-12-01
"""


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    call = make_run(capfd, monkeypatch, "fp8-policy")
    return lambda *arguments, today="2026-11-21": call("--today", today, *arguments)


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
    assert "not refused, and it must be: tied-embeddings" in words
    assert "the rule tied-embeddings must refuse this preset and refuses nothing of it" in words


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (POLICY, 'id = "tied-embeddings"', 'id = "embeddings"', "tied-embeddings"),
        (PRESETS, 'parts = ["mtp_head"]', 'parts = ["mtp"]', "mtp"),
        (PRESETS, 'refused_by = ["routers"]', "expires = 2026-12-01", "expires"),
        (WAIVERS, "waiver = []", WAIVER.format(preset="nightly"), "nightly"),
    ],
)
def test_a_wrong_matrix_is_neither_open_nor_closed(
    run: Run, matrix: Path, file: str, old: str, new: str, said: str
) -> None:
    mend(matrix / file, old, new)
    found = run("--matrix", matrix)
    assert found.code == WRONG
    assert said in found.err


@pytest.mark.parametrize(
    ("today", "code", "words"),
    [
        ("2026-12-01", OPEN, "waived until 2026-12-01"),
        ("2026-12-02", CLOSED, "expired on 2026-12-01, owner the owner of the head"),
    ],
)
def test_a_waiver_lets_through_until_its_day_and_is_shown_on_both_sides_of_it(
    run: Run, matrix: Path, today: str, code: int, words: str
) -> None:
    (matrix / WAIVERS).write_text(WAIVER.format(preset="auxiliary-heads"))
    mend(matrix / PRESETS, 'refused_by = ["auxiliary-heads"]\n', "")
    said = run("--matrix", matrix, today=today)
    assert said.code == code
    told = " ".join(said.out.split())
    assert words in told
    assert "FP8 in auxiliary heads [auxiliary-heads]: mtp_head runs in current" in told  # a waiver hides nothing


def test_what_was_rolled_back_may_be_tried_by_a_waiver_and_is_refused_again_after_it(run: Run, matrix: Path) -> None:
    (matrix / WAIVERS).write_text(WAIVER.format(preset="auxiliary-heads"))
    before, after = (run("--matrix", matrix, today=day) for day in ("2026-12-01", "2026-12-02"))
    assert (before.code, after.code) == (OPEN, OPEN)
    assert "auxiliary-heads allowed by waiver" in before.out
    assert "auxiliary-heads refused, as it must be" in after.out
    assert "expired" in after.out


def test_a_waiver_that_nothing_needs_is_shown(run: Run, matrix: Path) -> None:
    (matrix / WAIVERS).write_text(WAIVER.format(preset="production"))
    said = run("--matrix", matrix)
    assert said.code == OPEN
    assert "not needed" in said.out


def test_json_tells_the_outcome_of_every_preset(run: Run) -> None:
    told = json.loads(run("--format", "json").out)
    assert told["schema_id"] == "megacpp-validate/fp8-policy/1"
    outcomes = {row["preset"]: row["outcome"] for row in told["presets"]}
    assert outcomes["production"] == "allowed"
    assert outcomes["every-layer"] == "rolled-back"
