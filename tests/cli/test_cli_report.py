"""The verb of the report: exit codes, wrong arguments, and the forms in which it tells what it wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.cli.gate import report_verbs
from megacpp_validate.cli.gate.report_sources import read_rows
from megacpp_validate.report.site_result import SiteResult
from tests.command_line import Run, make_run

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "h200" / "te2.14.1"
OPEN, WRONG, NOTHING, INFRASTRUCTURE = 0, 2, 3, 6


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    return make_run(capfd, monkeypatch, "report", "--database", tmp_path / "index.sqlite")


def test_a_site_of_the_receipts_of_one_run(run: Run, tmp_path: Path) -> None:
    assert report_verbs.report
    said = run(EVIDENCE, "--output", tmp_path / "site")
    assert said.code == OPEN, said.err
    assert "7 receipts in 1 run: 7 cells, 7 not good" in said.out
    assert "te2.14.1-h200-imports: import error" in said.out
    assert str(tmp_path / "site" / "index.html") in said.out
    again = run(EVIDENCE, "--output", tmp_path / "site", "--format", "json")  # an older site is replaced
    result = SiteResult.model_validate_json(again.out)
    assert result.pages == len([path for path in (tmp_path / "site").rglob("*") if path.is_file()]) - 1
    assert {cell.page for cell in result.cells} <= {
        str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")
    }


def test_other_forms(run: Run, tmp_path: Path) -> None:
    site = ("--output", tmp_path / "site")
    junit = ET.fromstring(run(EVIDENCE, *site, "--format", "junit").out.encode())
    assert (junit.get("tests"), junit.get("errors")) == ("7", "7")
    assert "::warning title=te2.14.1-h200-imports::" in run(EVIDENCE, *site, "--format", "github").out
    told = tmp_path / "summary.md"
    assert run(EVIDENCE, *site, "--format", "markdown", "--told", told).out == ""
    assert "## Report" in told.read_text()
    assert run(EVIDENCE, *site, "--format", "html").code == WRONG


def test_wrong_arguments(run: Run, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert "there is no folder" in run(tmp_path / "none", "--output", site).err
    assert run(tmp_path / "none", "--output", site).code == WRONG
    (tmp_path / "empty").mkdir()
    said = run(tmp_path / "empty", "--output", site)
    assert said.code == NOTHING, said.err
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("")
    said = run(EVIDENCE, "--output", tmp_path / "precious")
    assert (said.code, "holds what no report wrote" in said.err) == (WRONG, True)
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["thesis.tex"]
    gate = tmp_path / "gate.json"
    gate.write_text(json.dumps({"schema_id": "megacpp-validate/release-gate/2"}))
    said = run(EVIDENCE, "--output", site, "--gate", gate)
    assert (said.code, "is no decision of the release gate" in said.err) == (WRONG, True)
    assert run(EVIDENCE, "--output", tmp_path / "precious" / "thesis.tex" / "site").code == WRONG
    assert not site.exists()


def test_a_store_may_hold_its_own_site(run: Run, tmp_path: Path) -> None:
    shutil.copytree(EVIDENCE, tmp_path / "store")
    for _ in range(2):
        said = run(tmp_path / "store", "--output", tmp_path / "store" / "report")
        assert (said.code, "7 receipts in 1 run" in said.out) == (OPEN, True)
    said = run(tmp_path / "store", "--output", tmp_path / "store")
    assert said.code == WRONG
    assert len(list((tmp_path / "store").glob("*.json"))) == 7


def test_a_full_disk(run: Run, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("not-run: there is no full device here")
    said = run(EVIDENCE, "--output", tmp_path / "site", "--format", "json", "--told", "/dev/full")
    assert said.code == INFRASTRUCTURE
    assert "the disk is full" in " ".join(said.err.split())
    assert (tmp_path / "site" / "index.html").is_file()


def test_what_a_report_needs_does_not_lie_where_it_writes(run: Run, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert run(EVIDENCE, "--output", site).code == OPEN
    for more in (("--told", site / "told.txt"), ("--database", site / "index.sqlite")):
        said = run(EVIDENCE, "--output", site, *more)
        assert (said.code, "Next step" in said.err) == (WRONG, True)
        assert not more[1].exists()
    shutil.copytree(EVIDENCE, site / "receipts")
    assert run(site / "receipts", "--output", site).code == WRONG
    assert len(list((site / "receipts").glob("*.json"))) == 7


def test_an_index_replaces_no_file_of_others(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EVIDENCE, tmp_path / "store")
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    receipt = next((tmp_path / "store").glob("*.json"))
    before = receipt.read_bytes()
    inside = (receipt, tmp_path / "store" / "index.sqlite", tmp_path / "store" / ".." / "store" / "x" / "y")
    for database in (notes, *inside):
        said = run(tmp_path / "store", "--output", tmp_path / "site", "--database", database)
        assert (said.code, "Next step" in said.err, said.out) == (WRONG, True, ""), database
    said = run(tmp_path / "store", "--output", tmp_path / "site", "--database", notes)
    assert "is there already, and is no index of this tool" in " ".join(said.err.split())
    assert "cannot be read" not in said.err  # the store can
    said = run(tmp_path / "store", "--output", tmp_path / "site", "--told", receipt)
    assert (said.code, "would be among its files" in " ".join(said.err.split())) == (WRONG, True)
    assert notes.read_text() == "precious"
    assert receipt.read_bytes() == before
    assert not (tmp_path / "site").exists()
    assert len(list((tmp_path / "store").iterdir())) == 7
    # The place in the cache is for an index alone: what is damaged there is made again.
    monkeypatch.setenv("MEGACPP_CACHE_DIR", str(tmp_path / "cache"))
    rows, _, _ = read_rows(tmp_path / "store", None)
    (kept,) = (tmp_path / "cache" / "index").iterdir()
    kept.write_bytes(b"damaged")
    assert read_rows(tmp_path / "store", None)[0] == rows
    assert kept.read_bytes().startswith(b"SQLite format 3")
