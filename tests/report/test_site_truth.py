"""The report site never looks better than its receipts: what hides a red one, and what a report must not replace."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.report.test_selftest import CLEAN, GOOD

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.cli import output
from megacpp_validate.cli.app import Exit
from megacpp_validate.cli.gate.report_sources import find_lost_rows, find_rates, find_scores
from megacpp_validate.evidence.receipt import Backend, Outcome, Receipt
from megacpp_validate.evidence.receipts_manifest import hash_manifest
from megacpp_validate.evidence.release_gate import CellVerdict, GateDecision, GateRule
from megacpp_validate.evidence.store import read_receipt
from megacpp_validate.report.site import told as site_told
from megacpp_validate.report.site.folder import MARK, NotOurFolder, refuse_inside, write_site
from megacpp_validate.report.site.marks import mark_backend, mark_history, mark_score
from megacpp_validate.report.site.score_words import say_partly
from megacpp_validate.report.site.values import CellHistory, SiteRow, arrange_stacks
from megacpp_validate.report.site_result import SiteResult
from megacpp_validate.report.words.parity import find_fallbacks
from megacpp_validate.report.words.selftest import ModuleScore
from tests.report.reading import Page
from tests.report.site_stores import EVIDENCE, NOW, add, make_site

STACK = "te2.20.2"
CELL = f"{STACK}-h200-imports"
GREEN = SiteRow("good", CELL, STACK, "h200", "imports", Outcome.PASS, "2026-11-22T10:00:00+00:00", "good/a.json")
RED = replace(GREEN, run="red", path="red/a.json", outcome=Outcome.ERROR)


def arrange(*rows: SiteRow) -> CellHistory:
    (stack,) = arrange_stacks(rows, NOW)
    return stack.cells["imports"]


@pytest.mark.parametrize(
    ("row", "tone", "doubt"),
    [
        (replace(RED, started="2026-11-23T01:00:00+00:00"), "risk", "clock ahead"),
        # As text this is before the report's clock, and as an instant two hours after it.
        (replace(RED, started="2026-11-22T21:00:00-05:00"), "risk", "clock ahead"),
        # As text this is after the report's clock, and as an instant four hours before it.
        (replace(RED, started="2026-11-23T01:00:00+05:00"), "bad", ""),
        (replace(RED, started=GREEN.started, run="aa"), "bad", ""),
        (replace(RED, started="2026-11-22T11:00:00+00:00", run="x/again", only_times=True), "risk", "timed again"),
        (replace(RED, started="2026-11-22T09:00:00+00:00", run="good/again", only_times=True), "risk", "timed again"),
        (replace(RED, started=""), "risk", "without a date"),
        (replace(RED, started="2026-11-22T09:00:00+00:00"), "good", ""),
        (replace(GREEN, started="2026-11-22T11:00:00+00:00", run="good/again", only_times=True), "good", ""),
        (replace(GREEN, started="2026-11-23T01:00:00+00:00"), "good", ""),
    ],
)
def test_a_red_receipt_is_not_hidden(row: SiteRow, tone: str, doubt: str) -> None:
    for rows in ((GREEN, row), (row, GREEN)):
        cell = arrange(*rows)
        assert mark_history(cell).tone == tone
        assert doubt in mark_history(cell).word
        assert cell.holds == (tone == "good")


@pytest.mark.parametrize(("green", "red"), [("aa", "zz"), ("zz", "aa")])
def test_one_process_told_in_two_ways_is_never_green(green: str, red: str) -> None:
    cell = arrange(replace(GREEN, run=green, contradicts="b"), replace(RED, run=red, contradicts="a"))
    assert mark_history(cell).tone == "bad"
    assert mark_history(cell).word == "error, contradicted"
    both = arrange(replace(GREEN, run=green, contradicts="b"), replace(GREEN, run=red, contradicts="a"))
    assert mark_history(both).tone == "risk"


def test_a_run_for_its_times_alone_outdates_no_red_one() -> None:
    timed = replace(GREEN, started="2026-11-22T11:00:00+00:00", run="later", only_times=True)
    assert mark_history(arrange(RED, timed)).tone == "bad"


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("te2.21.0", "te2.21.0.post1"),
        ("te2.21.0", "te2.21.0.1"),
        ("te2.21.0rc1", "te2.21.0"),
        ("te2.9.0", "te2.12.0"),
        ("te2.21.0.dev3", "te2.21.0rc1"),
        ("te2.20.2-of-ours", "te2.21.0"),
    ],
)
def test_the_newest_release_stands_first(older: str, newer: str) -> None:
    rows = [replace(GREEN, stack=name, cell=f"{name}-h200-imports") for name in (older, newer)]
    assert [stack.stack for stack in arrange_stacks(rows, NOW)] == [newer, older]
    assert [stack.stack for stack in arrange_stacks(rows[::-1], NOW)] == [newer, older]


def imports_of(stack: str) -> Receipt:
    return read_receipt(EVIDENCE / "h200" / stack / f"{stack}-h200-imports.json")


def index_of(site: Path) -> str:
    return Page((site / "index.html").read_text()).text


@pytest.fixture(scope="module")
def told(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SiteResult]:
    """A green release with a red receipt from the future, one of another family of cells, and one that is all lost."""
    store = tmp_path_factory.mktemp("truth") / "store"
    good = imports_of("te2.20.2")
    add(store / "a", good)
    red = imports_of("te2.14.1")
    add(store / "z", replace(red, stack=STACK, cell=CELL, started="2999-01-01T00:00:00+00:00"))
    add(store / "a", replace(red, started="2026-11-20T00:00:00+00:00"))
    between = read_receipt(EVIDENCE / "fp8" / "te2.20.2" / "te2.20.2-h200-fp8_current.json")
    add(store / "a", replace(between, stack="te2.17.0", cell="te2.17.0-h200-fp8_current"))
    for probe in ("imports", "attention"):
        (store / "a" / f"te2.21.0-h200-{probe}.json").write_text('{"cell": "te2.21.0-h2')
    smoke = read_receipt(EVIDENCE / "smoke" / "small" / "te2.20.2-h200-smoke_small_delayed.json")
    # No schema bounds it, and no float holds it.
    records = (replace(smoke.training[0], parameters=10**400), *smoke.training[1:])
    add(store / "a", replace(smoke, training=records))
    return store.parent / "site", make_site(catalog, store, store.parent / "site")


def test_lost_doubted_and_undrawn_cells_are_told(told: tuple[Path, SiteResult]) -> None:
    site, result = told
    cells = {cell.cell: cell for cell in result.cells}
    assert cells[CELL].doubt == "clock ahead"
    assert cells["te2.21.0-h200-imports"].doubt == "file lost"
    smoke = cells["te2.20.2-h200-smoke_small_delayed"]
    assert (smoke.outcome, smoke.doubt) == (Outcome.NOT_RUN, "file lost")
    assert {cells[CELL], cells["te2.21.0-h200-imports"], smoke} <= set(result.not_good)
    text = index_of(site)
    assert "te2.21.0 on h200 has no receipt of imports" in text
    assert "▲ pass, clock ahead" in text
    assert "holds in every" not in text
    assert "0 of 1 step breaks something" in site_told.summarize_site(result)
    assert "it cannot be shown: OverflowError" in Page((site / "files.html").read_text()).text
    assert result.receipts == 5
    assert f"{CELL}: pass, clock ahead" in site_told.render_site_summary(result)
    assert site_told.render_site_junit(result).count("<error") >= 2


def test_blame_is_judged_across_a_stack_without_modules(told: tuple[Path, SiteResult]) -> None:
    site, result = told
    assert [(step.before, step.after) for step in result.steps] == [("te2.14.1", STACK)]
    assert f"no evidence on {CELL}" in index_of(site)  # it is in doubt: nobody says that the step breaks nothing
    assert "✓ breaks nothing" not in Page((site / "steps.html").read_text()).text
    assert result.steps[0].lost[0] == CELL
    summary = site_told.render_site_summary(result)
    assert f"nobody is to blame, and there is no evidence on {CELL} and 6 other cells" in summary


def test_a_lost_row_needs_a_known_target() -> None:
    files = {"te2.21.0-h200-imports": ["a"], CELL: ["b"], "canary": ["c"], "te2.1-mars-x": ["d"]}
    rows = list(find_lost_rows([GREEN], files, ()))
    assert [(row.stack, row.target, row.probe, row.path) for row in rows] == [("te2.21.0", "h200", "imports", "a")]


def decision(**values: object) -> GateDecision:
    said = {"tool": "t", "release": "te-upgrade", "stack": STACK, "target": "h200", "open": True, "exit_code": 0}
    said |= {"cells": (), "rules_sha256": "1" * 64, "receipts_sha256": "2" * 64, "judged_at": NOW}
    return GateDecision.model_validate(said | values)


@pytest.mark.parametrize(
    "values",
    [
        {"exit_code": 1},
        {"exit_code": 7, "open": False},
        {"open": False},
        {"cells": (CellVerdict(cell=CELL, required=True, closes=True),)},
        {"open": False, "exit_code": 4},
        {"cells": (CellVerdict(cell=CELL, required=True, rules=(GateRule.MISSING,)),)},
    ],
)
def test_a_decision_that_says_two_things_is_none(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"gate is|none of a decision|1 rules, and says 0 reasons"):
        decision(**values)
    assert decision().open


@pytest.mark.parametrize("bound", [True, False])
def test_a_decision_makes_no_page_look_better(bound: bool, catalog: Catalog, tmp_path: Path) -> None:
    file = add(tmp_path / "store" / "run", imports_of("te2.14.1"))
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    made = decision(stack="te2.14.1", receipts_sha256=hash_manifest(hashes) if bound else "2" * 64)
    (tmp_path / "gate.json").write_text(made.model_dump_json())
    make_site(catalog, tmp_path / "store", tmp_path / "site", tmp_path / "gate.json")
    text = index_of(tmp_path / "site")
    assert "te2.14.1 on h200 does not hold in imports" in text
    assert "0 of 1 stack holds" in text
    assert ("open, of other receipts" in text) != bound
    assert 'class="answer bad"' in (tmp_path / "site" / "index.html").read_text()


def test_a_report_replaces_nothing_but_pages(catalog: Catalog, tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_site(site, [("index.html", "old")])
    store = site / "receipts"
    add(store, imports_of("te2.20.2"))
    with pytest.raises(NotOurFolder, match="receipts"):
        make_site(catalog, store, site)
    shutil.rmtree(store)
    for place in (site, site / "gate.json", site / "a" / ".." / "b.sqlite"):
        with pytest.raises(NotOurFolder, match="Next step"):
            refuse_inside(site, [place])
    refuse_inside(site, [tmp_path, tmp_path / "site2"])
    for name in ("notes.html", "cell/notes.txt"):
        (site / "cell").mkdir(exist_ok=True)
        (site / name).write_text("precious")
        with pytest.raises(NotOurFolder, match=name):
            write_site(site, [("index.html", "new")])
        assert (site / name).read_text() == "precious"
        (site / name).unlink()
    (site / MARK).write_text("A report site: the next report replaces this folder.\n")  # as an earlier version wrote it
    write_site(site, [("index.html", "new")])

    def pages_while_somebody_writes() -> list[tuple[str, str]]:
        (site / "late.txt").write_text("precious")
        return [("index.html", "newer")]

    with pytest.raises(NotOurFolder, match="late"):
        write_site(site, (page for page in pages_while_somebody_writes()))
    assert (site / "late.txt").read_text() == "precious"


def test_a_silent_fallback_is_badged_as_one() -> None:
    (silent, honest) = (Backend("attention", "te", "te", ("native",)), Backend("mlp", "te", "te", ("te",)))
    good = imports_of("te2.20.2")
    check = replace(good.checks[0], name="attention.backend", passed=False)
    receipt = replace(good, requested="te", checks=(check,), backends=(silent, honest))
    fell_back = find_fallbacks(receipt)
    assert mark_backend(silent, fell_back).word == "fell back"
    assert mark_backend(honest, fell_back).word == "as requested"


def test_a_part_of_the_selftest_is_not_all_of_it() -> None:
    of_all = replace(CLEAN, mutants=(GOOD,), finished_at="2026-11-20T00:00:00+00:00")
    newer = replace(of_all, finished_at="2026-11-21T00:00:00+00:00")
    part = replace(CLEAN, mutants=(), finished_at="2026-11-22T00:00:00+00:00")
    read = {"a": of_all, "b": newer, "c": part}
    assert list(find_scores(read)) == ["c", "b", "a"]
    assert {rate.source for rate in find_rates(read, {GOOD.mutant.id}, NOW)} == {"b"}
    assert {rate.source for rate in find_rates({"c": part}, {GOOD.mutant.id}, NOW)} == {"c"}
    assert say_partly(of_all, {GOOD.mutant.id}) == ""
    assert say_partly(of_all, {GOOD.mutant.id, "other"}) == "of 1 of 2 mutants of the matrix"
    assert say_partly(part, ()) == "of no mutant at all"
    assert mark_score(ModuleScore("imports", 0, 0, 0)).word == "not run"


def test_a_full_disk_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("not-run: this system has no /dev/full")
    with pytest.raises(SystemExit) as ended:
        output.write_told(None, lambda: "x", full, option="--told")
    assert ended.value.code == Exit.INFRASTRUCTURE
    said = " ".join(capsys.readouterr().err.split())
    assert "disk is full" in said
    assert "--told" in said
