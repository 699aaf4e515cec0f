"""The verb of the report: exit codes, and the forms in which it says what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.report.site.build import SiteResult
from tests.command_line import Run, make_run_in

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "h200" / "te2.14.1"
OPEN, WRONG, NOTHING, MISSING = 0, 2, 3, 4


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return make_run_in(tmp_path, "report", capfd, monkeypatch)


def test_a_site_of_the_receipts_of_one_run(run: Run, tmp_path: Path) -> None:
    done = run(EVIDENCE, "--output", tmp_path / "site")
    assert done.code == OPEN, done.err
    assert "9 receipts in 1 run: 9 cells; steps that break something: 0 of 0; not good: te2.14.1-h200" in done.out
    assert str(tmp_path / "site" / "index.html") in done.out
    again = run(EVIDENCE, "--output", tmp_path / "site", "--format", "json")  # an older site is replaced
    result = SiteResult.model_validate_json(again.out)
    assert result.pages == len(list((tmp_path / "site").rglob("*.html")))
    assert all((tmp_path / "site" / cell.page).is_file() for cell in result.cells)


def test_wrong_arguments(run: Run, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "te2.20.2-h200-attention.json").write_text("{")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("")
    for arguments, code, words in (
        ((tmp_path / "none", "--output", site), WRONG, "cannot be read"),
        ((tmp_path / "empty", "--output", site), NOTHING, "Next step: give a folder of receipts"),
        ((tmp_path / "damaged", "--output", tmp_path / "pages"), MISSING, "not good: te2.20.2-h200-attention.json"),
        ((EVIDENCE, "--output", tmp_path / "precious" / "thesis.tex" / "site"), WRONG, "cannot be written"),
    ):
        done = run(*arguments)
        assert (done.code, words in done.out + done.err) == (code, True), done
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["thesis.tex"]
    assert not site.exists()
