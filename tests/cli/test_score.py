"""The suite's own score in public: of a full selftest alone, with intervals that are of the counts, and fresh."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.scores import (
    EVIDENCE,
    FaultScore,
    ScoreRow,
    SuiteScore,
    Verdict,
    plan_mutant,
    read_score,
)
from megacpp_validate.catalog.bridge import matrix_folder, read_catalog
from megacpp_validate.errors import Exit
from megacpp_validate.report.describe.scores import describe_score
from megacpp_validate.report.render.json import render_json
from megacpp_validate.report.render.markdown import render_markdown
from tests.command_line import end_of

ROOT = Path(__file__).parents[2]
SHOWN = "docs/examples/score.md"
FILES = ("blame_score.json", "blame_score_held_out.json")


def full_selftest() -> FaultScore:
    """A selftest of every mutant of the matrix, of which the first lives."""
    rows = [plan_mutant(row).model_copy(update={"verdict": Verdict.RIGHT}) for row in read_catalog().mutants]
    rows[0] = rows[0].model_copy(update={"verdict": Verdict.MISSED})
    clean = ScoreRow(id="a-cell, seed 0", where="path te, seed 0", verdict=Verdict.QUIET)
    return FaultScore(suite="selftest", target="cpu", environment="here", faults=tuple(rows), clean=(clean,))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(matrix_folder(), tmp_path / "matrix")
    shutil.copytree(ROOT / "containers" / "locks", tmp_path / "containers" / "locks")
    evidence = tmp_path / "docs" / "evidence"
    evidence.mkdir(parents=True)
    for name in FILES:
        shutil.copy(ROOT / "docs" / "evidence" / name, evidence)
    (evidence / "selftest.json").write_text(render_json(full_selftest()))
    return tmp_path


PARTIAL = {
    "some mutants": lambda data: data.update(faults=data["faults"][:5]),
    "an unknown mutant": lambda data: data["faults"][0].update(id="another"),
    "one twice": lambda data: data["faults"].append(data["faults"][0]),
    "no clean run": lambda data: data.update(clean=[]),
    "another fault under an old name": lambda data: data["faults"][0].update(where="checkpoints"),
    "another module is to be blamed": lambda data: data["faults"][-1].update(expected=[{"by": "imports"}]),
}


@pytest.mark.parametrize("change", PARTIAL.values(), ids=PARTIAL)
def test_what_is_no_full_selftest_is_no_score(
    change: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = checkout / "docs" / "evidence" / "selftest.json"
    change(data := json.loads(file.read_text()))
    file.write_text(json.dumps(data))
    assert end_of(monkeypatch, "score", "--matrix", checkout / "matrix") == 4
    assert "not of a full selftest" in capfd.readouterr().err


@pytest.mark.parametrize("name", [name.name for name in EVIDENCE])
def test_a_file_that_is_missing_or_holds_no_score_has_its_exit_code(
    name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = checkout / "docs" / "evidence" / name
    file.write_text("{}")
    assert end_of(monkeypatch, "score", "--matrix", checkout / "matrix") == Exit.WRONG_ARGUMENTS
    assert f"{name} holds no score: suite: Field required" in capfd.readouterr().err
    file.unlink()
    assert end_of(monkeypatch, "score", "--matrix", checkout / "matrix") == Exit.EVIDENCE_MISSING
    assert f"{name} cannot be read" in capfd.readouterr().err


def test_what_is_committed_is_fresh() -> None:
    """The counts are those of the evidence, the page is that of the counts; days come with commits."""
    score = SuiteScore.model_validate_json((ROOT / "docs/evidence/score.json").read_text())
    now = read_score(read_catalog())

    def counts(result: SuiteScore) -> list[tuple[str, int, int, str, str]]:
        return [(rate.id, rate.hits, rate.trials, rate.says, rate.source) for rate in result.rates]

    assert counts(score) == counts(now)
    assert score.rates[0].day == now.rates[0].day
    assert (ROOT / SHOWN).read_text() == render_markdown(describe_score(score))
