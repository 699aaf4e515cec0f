"""The report site without a browser: what its pages say, where its links lead, and what it makes of faults."""

from __future__ import annotations

import json
import posixpath
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.report.test_hostile import SEEN, STATIC
from tests.report.test_selftest import ASTRAY, CLEAN, GOOD, SURVIVOR

from megacpp_validate.canary.dynamic.upgrade_result import StepResult
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.evidence.receipt import Outcome, Receipt
from megacpp_validate.evidence.release_gate import CellVerdict, GateCulprit, GateDecision, GateRule
from megacpp_validate.evidence.store import ReceiptInvalid, read_receipt
from megacpp_validate.report import machine
from megacpp_validate.report.site import pages as site_pages
from megacpp_validate.report.site import values as site_values
from megacpp_validate.report.site.paths import cell_page, is_page, stack_page, step_page, target_page
from megacpp_validate.report.site.values import SiteFacts, SiteRow, arrange_stacks, plan_depths
from megacpp_validate.report.site.whole import SiteOverview, SiteSource, StackSeen, render_site
from megacpp_validate.report.site_result import SiteResult
from megacpp_validate.report.words.gate import mark_cell_verdict, name_culprit, say_why
from tests.report.reading import Page
from tests.report.site_stores import NOW, add, copy_store, make_site

FIRST_PAGE = 300_000  # bytes
MAIN = ("index", "steps", "gate", "training", "trends", "environments", "score", "files")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_store(tmp_path_factory.mktemp("store") / "store")
    score = replace(CLEAN, mutants=(GOOD, SURVIVOR, ASTRAY))
    (folder / "score.json").write_text(machine.to_json(score))
    (folder / "canary.json").write_text(machine.to_json(STATIC))
    (folder / "cached-kernel.json").write_text('{"num_warps": 4}')
    (folder / "canary-cut.json").write_text(machine.to_json(STATIC)[:-2])
    return folder


@pytest.fixture(scope="module")
def site(store: Path, catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SiteResult]:
    folder = tmp_path_factory.mktemp("site")
    decision = folder / "decision.json"
    decision.write_text(closed_gate().model_dump_json())
    return folder / "site", make_site(catalog, store, folder / "site", decision)


def closed_gate() -> GateDecision:
    red = CellVerdict(
        cell="te2.17.1-h200-attention", stack="te2.17.1", target="h200", probe="attention", run="te2.17.1",
        outcome=Outcome.ERROR, required=True, closes=True, rules=(GateRule.OUTCOME,), reasons=("error: cuDNN said no",),
    )  # fmt: skip
    missing = CellVerdict(
        cell="te2.17.1-h200-permute", required=True, closes=True, rules=(GateRule.MISSING,), reasons=("no receipt",)
    )  # fmt: skip
    return GateDecision(
        tool="a test", release="te-upgrade", stack="te2.17.1", target="h200", open=False, exit_code=1,
        cells=(red, missing), missing=("te2.17.1-h200-permute",), rules_sha256="1" * 64, receipts_sha256="2" * 64,
        culprits=(GateCulprit(module="attention", cause="environment", component="cuDNN", summary="it is too old"),),
        judged_at=NOW,
    )  # fmt: skip


def text_of(site: Path, name: str) -> str:
    return Page((site / name).read_text()).text


def test_every_link_leads_to_a_page_of_the_site(site: tuple[Path, SiteResult]) -> None:
    folder, result = site
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {f"{name}.html" for name in MAIN} <= files
    assert len(files) == result.pages + 1  # and the mark
    for name in sorted(file for file in files if file.endswith(".html") and not file.startswith("result/")):
        page = Page((folder / name).read_text())
        ids = {attributes.get("id") for _, attributes in page.tags}
        for tag, attributes in page.tags:
            for link in filter(None, (attributes.get("href"), attributes.get("src"))):
                if link.startswith("#"):
                    assert link[1:] in ids
                elif link != "data:,":
                    led = (folder / name).parent / link
                    assert led.resolve().is_relative_to(folder.resolve()), (name, link)
                    assert led.is_file(), (name, tag, link)


def reach(pages: dict[str, Page], first: str = "index.html") -> set[str]:
    """Pages that somebody who opens the first one can come to."""
    seen, ahead = {first}, [first]
    while ahead:
        here = ahead.pop()
        for _, attributes in pages[here].tags:
            name = posixpath.normpath(posixpath.join(posixpath.dirname(here), attributes.get("href") or ""))
            if name in pages and name not in seen:
                seen.add(name)
                ahead.append(name)
    return seen


def test_every_page_is_reached_from_the_first_one(site: tuple[Path, SiteResult]) -> None:
    folder, _ = site
    pages = {str(path.relative_to(folder)): Page(path.read_text()) for path in folder.rglob("*.html")}
    assert reach(pages) == pages.keys()


def test_a_target_page_links_every_cell_of_its_target(site: tuple[Path, SiteResult]) -> None:
    folder, result = site
    page = Page((folder / target_page("h200")).read_text())
    linked = {link.removeprefix("../") for _, attributes in page.tags if (link := attributes.get("href"))}
    assert {cell.page for cell in result.cells if cell.target == "h200"} <= linked
    assert len([cell for cell in result.cells if cell.target == "h200"]) == 9
    heads = re.findall(r'<th scope="col">(.*?)</th>', (folder / target_page("h200")).read_text())
    assert {"imports", "native_block", "smoke_small_delayed"} <= {head.replace("<wbr>", "") for head in heads}


def test_pages_can_be_read_by_everybody(site: tuple[Path, SiteResult]) -> None:
    for path in site[0].rglob("*.html"):
        page = Page(path.read_text())
        assert page.open == []
        assert ("html", {"lang": "en"}) in page.tags
        assert sum(tag == "h1" for tag, _ in page.tags) == 1
        assert all(attributes.get("scope") in {"col", "row"} for tag, attributes in page.tags if tag == "th")
        assert any(attributes.get("name") == "viewport" for tag, attributes in page.tags if tag == "meta")
        assert not any(key == "style" or key.startswith("on") for _, attributes in page.tags for key in attributes)
        levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
        assert all(later <= earlier + 1 for earlier, later in pairwise(levels)), path.name


def test_the_first_page_answers(site: tuple[Path, SiteResult]) -> None:
    text = text_of(site[0], "index.html")
    assert "Release gate: te2.17.1 on h200: closed, of other receipts. te2.20.2 on h200" in text
    assert "Closed by attention (cuDNN, environment): " in text
    assert (
        "✗ breaks te2.14.1 → te2.17.1 on h200: Breaks attention (environment: cuDNN), and with it native_block" in text
    )
    assert re.search(r"turn a probe red\s*2 of 3\s*66.7%\s*20.8% to 93.9%", text)
    assert "✗ import error" in text


def test_the_gate_speaks_as_it_does_in_a_terminal(site: tuple[Path, SiteResult]) -> None:
    text = text_of(site[0], "gate.html")
    (culprit,) = closed_gate().culprits
    assert f"culprit {name_culprit(culprit)}" in text
    for verdict in closed_gate().required:
        assert mark_cell_verdict(verdict).word in text
        assert all(why in text for why in say_why(verdict))


def test_a_cell_of_the_grid_opens_to_its_receipt(site: tuple[Path, SiteResult]) -> None:
    page = Page((site[0] / "index.html").read_text())
    cells = [attributes for tag, attributes in page.tags if tag == "a" and "cell" in (attributes.get("class") or "")]
    assert cell_page("te2.17.1-h200-attention") in [cell["href"] for cell in cells]
    text = text_of(site[0], cell_page("te2.17.1-h200-attention"))
    for said in (
        "CUDNN_STATUS_BAD_PARAM",
        "All 56 checks",
        "second copy",
        "libcudnn",
        "at most",
        "Backends: requested",
    ):
        assert said in text
    assert "2 of 2" not in text


def test_the_blame_of_a_step_stands_with_its_evidence(site: tuple[Path, SiteResult]) -> None:
    text = text_of(site[0], step_page("h200", "te2.14.1", "te2.17.1"))
    for said in (
        "culprit attention (environment: cuDNN)",
        "nvidia-cudnn-cu13>=9.22",
        "↳ by attention",
        "package torch",
    ):
        assert (said in text) == (said != "package torch"), said  # torch is the same on both sides: no difference


def test_runs_of_one_cell_are_a_history_and_a_trend(site: tuple[Path, SiteResult]) -> None:
    text = text_of(site[0], cell_page("te2.20.2-h200-imports"))
    assert "History: 3 receipts" in text
    assert "earlier/19" in text
    assert re.search(r"[\d.]+ s, [\d.]+ x the median of 2 earlier \(5.5 s\)", text)
    assert "te2.20.2-h200-imports" in text_of(site[0], "trends.html")


def test_training_runs_are_drawn(site: tuple[Path, SiteResult]) -> None:
    text = text_of(site[0], "training.html")
    for said in ("te2.20.2-h200-smoke_small_delayed", "loss in nats", "perfect model", "only the phase step trains"):
        assert said in text


def test_the_score_names_what_is_not_as_it_should_be(site: tuple[Path, SiteResult]) -> None:
    text = text_of(site[0], "score.html")
    assert "survived: every probe was good" in text
    assert "▲ killed, wrong blame" in text


def test_results_of_other_verbs_have_their_page(site: tuple[Path, SiteResult]) -> None:
    page = Page((site[0] / "files.html").read_text())
    links = [link for _, attributes in page.tags if (link := attributes.get("href") or "").startswith("result/")]
    assert len(links) == 1
    assert "cached-kernel" not in page.text
    assert SEEN in Page((site[0] / links[0]).read_text()).text


def test_environments_are_in_the_page_as_data(site: tuple[Path, SiteResult]) -> None:
    source = (site[0] / "environments.html").read_text()
    found = re.search(r'<script type="application/json" id="environments">(.*?)</script>', source, re.DOTALL)
    data = json.loads(found[1])
    assert len(data["facts"]) == 9
    assert "package transformer_engine" in data["texts"]
    assert "2.17.1" in text_of(site[0], "environments.html")  # of adjacent releases, without a script


def test_what_is_no_receipt_is_lost_and_not_good(store: Path, catalog: Catalog, tmp_path: Path) -> None:
    other = tmp_path / "store"
    good = read_receipt(store / "te2.20.2" / "te2.20.2-h200-imports.json")
    for stack in ("te2.20.0", "te2.20.1", "te2.20.2"):
        add(other / "one", replace(good, stack=stack, cell=f"{stack}-h200-imports"))
    cut = other / "two" / "te2.20.2-h200-imports.json"
    cut.parent.mkdir()
    cut.write_text('{"cell": "te2.20.2-h200-imp')
    later = add(other / "one", replace(good, stack="te2.20.3", cell="te2.20.3-h200-imports"))
    later.write_text(re.sub("receipt/[0-9]", "receipt/9", later.read_text()))
    lied = other / "one" / "te2.20.1-h200-imports.json"
    # A bound that the observation is beyond, in a part that says it passed: an index by fields alone takes that.
    lie = r'"observed": 7e9,\g<1>0.5'
    lied.write_text(re.sub(r'"observed": [0-9.e+-]+,(\s+"bound": )[0-9.e+-]+', lie, lied.read_text(), count=1))
    ahead = replace(
        good, stack="te2.20.0", cell="te2.20.0-h200-imports", started="2999-01-01T00:00:00+00:00", reason="x"
    )
    add(other / "ahead", ahead)
    result = make_site(catalog, other, tmp_path / "site")
    assert len(result.unreadable) == 3
    index = text_of(tmp_path / "site", "index.html")
    assert "▲ pass, file lost" in index
    assert "could not be read" in index
    assert "clock ahead" in text_of(tmp_path / "site", cell_page("te2.20.0-h200-imports"))
    assert str(cut.relative_to(other)) in text_of(tmp_path / "site", "files.html")
    assert {cell.cell: cell.outcome for cell in result.cells}["te2.20.1-h200-imports"] is Outcome.NOT_RUN


def test_the_same_evidence_gives_the_same_bytes(store: Path, catalog: Catalog, tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_site(catalog, store, tmp_path / name)
    one, two = (
        {str(p.relative_to(tmp_path / n)): p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in ("one", "two")
    )
    assert one == two


def rows_of(number: int) -> list[SiteRow]:
    """As many cells: 8 targets, releases without end."""
    modules = (
        "imports",
        "attention",
        "linear_walker",
        "permute",
        "expert_gemm",
        "native_block",
        "layer_spec",
        "fp8_block",
    )
    rows = []
    for index in range(number):
        stack, target, probe = f"te2.{index // 64}.0", f"target{index // 8 % 8}", modules[index % 8]
        cell = f"{stack}-{target}-{probe}"
        rows.append(SiteRow("run", cell, stack, target, probe, Outcome.PASS, "2026-01-01", f"run/{cell}.json"))
    return rows


def test_the_first_page_stays_small() -> None:
    modules = tuple(row.probe for row in rows_of(7))
    facts = SiteFacts("store", "a test", NOW, modules, arrange_stacks(rows_of(10_000), NOW))
    page = site_pages.render_index(facts, ())
    assert len(page.encode()) <= FIRST_PAGE
    assert "te2.156.0" in page  # the newest
    assert "older stacks" in page
    assert all(is_page(cell_page(row.cell)) for row in rows_of(50))


def test_older_stacks_are_judged_and_then_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_values, "MOST_FULL", 8 * 16)
    monkeypatch.setattr(site_values, "MOST_JUDGED", 8 * 3)
    stacks = arrange_stacks(rows_of(8 * 64), NOW)
    facts = SiteFacts("store", "a test", NOW, ("imports", "attention"), stacks, depths=plan_depths(stacks))
    read: list[str] = []

    def refuse(row: SiteRow) -> Receipt:
        read.append(row.stack)
        raise ReceiptInvalid(Path(row.path), "a test reads nothing")

    def judge(target: str, older: StackSeen, newer: StackSeen) -> StepResult:
        raise AssertionError("there is nothing to judge")

    overview = SiteOverview()
    pages = dict(render_site(facts, SiteSource(refuse, judge), overview))
    seen = {stack: read.count(stack) for stack in ("te2.7.0", "te2.6.0", "te2.5.0", "te2.4.0", "te2.0.0")}
    assert seen == {"te2.7.0": 64, "te2.6.0": 64, "te2.5.0": 16, "te2.4.0": 0, "te2.0.0": 0}
    assert all(cell.page in pages for cell in overview.cells)
    assert len(overview.cells) == 8 * 64
    drawn = {path: Page(text) for path, text in pages.items() if path.endswith(".html")}
    assert reach(drawn) == drawn.keys()
    listed = Page(pages[stack_page("target0", "te2.0.0")])
    assert "run/te2.0.0-target0-fp8_block.json" in listed.text
    assert "5 older stacks" not in Page(pages["index.html"]).text


def test_releases_stand_in_their_order() -> None:
    stacks = ["te2.9.0", "native", "te2.12.0", "te2.12.0rc1"]
    rows = [SiteRow("", f"{name}-cpu-imports", name, "cpu", "imports", Outcome.PASS, "", "") for name in stacks]
    assert [stack.stack for stack in arrange_stacks(rows, NOW)][:1] != ["native"]
    assert [stack.stack for stack in arrange_stacks(rows, NOW)][2:] == ["te2.9.0", "native"]
