"""The suite's own score in public: of a full selftest alone, with intervals that are of the counts, and fresh."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.scores import SCORE, SuiteScore, read_score
from megacpp_validate.catalog.bridge import matrix_folder, read_catalog
from megacpp_validate.evidence.selftest import Fate, MutantResult, SelftestResult
from megacpp_validate.report.describe.scores import describe_score
from megacpp_validate.report.render.json import render_json
from megacpp_validate.report.render.markdown import render_markdown
from tests.command_line import end_of

ROOT = Path(__file__).parents[2]
SHOWN = "docs/examples/score.md"
NAMES = tuple(
    Path("docs/evidence") / name for name in ("selftest.json", "blame_score.json", "blame_score_held_out.json")
)
FILES = ("blame_score.json", "blame_score_held_out.json")


def full_selftest(*, day: str = "2026-11-20T10:00:00+00:00", alive: int = 1, alarms: int = 2) -> SelftestResult:
    """A selftest of every mutant of the matrix, of which some live."""
    catalog = read_catalog()
    mutants = tuple(
        MutantResult(row, Fate.SURVIVED if number < alive else Fate.KILLED, () if number < alive else (row.module,))
        for number, row in enumerate(catalog.mutants)
    )
    heard = tuple(f"a-cell, seed {seed}: a check" for seed in range(alarms))
    modules = tuple(module.id for module in catalog.modules)
    return SelftestResult(modules, mutants, 200, heard, finished_at=day)


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
    "some mutants": lambda data: data.update(mutants=data["mutants"][:5]),
    "an unknown mutant": lambda data: data["mutants"][0]["mutant"].update(id="another"),
    "one twice": lambda data: data["mutants"].append(data["mutants"][0]),
    "no clean run": lambda data: data.update(clean_runs=0, false_alarms=[]),
    "another fault under an old name": lambda data: data["mutants"][0]["mutant"].update(at="checkpoints"),
    "another module is to be blamed": lambda data: data["mutants"][-1]["mutant"].update(module="imports"),
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


def test_what_is_committed_is_fresh() -> None:
    """The counts are those of the evidence, the page is that of the counts; days come with commits."""
    score = SuiteScore.model_validate_json((ROOT / SCORE).read_text())
    now = read_score(read_catalog(), ROOT, *NAMES)

    def counts(result: SuiteScore) -> list[tuple[str, int, int, str, str]]:
        return [(rate.id, rate.hits, rate.trials, rate.says, rate.source) for rate in result.rates]

    assert counts(score) == counts(now)
    assert score.rates[0].day == now.rates[0].day
    assert (ROOT / SHOWN).read_text() == render_markdown(describe_score(score))
