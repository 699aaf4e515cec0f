"""A site of real receipts: every link leads somewhere, and nothing looks better than its receipts."""

from __future__ import annotations

import json
import posixpath
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.errors import WrongArguments
from megacpp_validate.evidence.receipt import Outcome, Receipt, write_receipt
from megacpp_validate.evidence.store import read_receipt
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.site.build import MARK, SiteResult, write_report, write_site
from megacpp_validate.report.site.pages import describe_site
from tests.report.page import Page

EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence"
NOW = "2026-11-23T00:00:00+00:00"
STACK = "te2.20.2"
CELL = f"{STACK}-h200-imports"
RUNS = {
    "te2.14.1": ("imports", "attention", "native_block"),
    "te2.17.1": ("imports", "attention", "native_block"),
    "te2.20.2": ("imports", "attention"),
}


def add(folder: Path, receipt: Receipt) -> Path:
    path = folder / f"{receipt.cell}.json"
    write_receipt(receipt, path)
    return path


def imports_of(stack: str) -> Receipt:
    return read_receipt(EVIDENCE / "h200" / stack / f"{stack}-h200-imports.json.xz")


def make_site(catalog: Catalog, store: Path, site: Path) -> SiteResult:
    return write_report(catalog, store, site, NOW)


def text_of(site: Path, name: str) -> str:
    return Page((site / name).read_text()).text


@pytest.fixture(scope="module")
def site(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SiteResult]:
    """Three releases on an H200, one of them in three runs, and a smoke run."""
    folder = tmp_path_factory.mktemp("site")
    for stack, probes in RUNS.items():
        for probe in probes:
            name = f"{stack}-h200-{probe}.json.xz"
            (folder / "store" / stack).mkdir(parents=True, exist_ok=True)
            shutil.copy(EVIDENCE / "h200" / stack / name, folder / "store" / stack)
    add(folder / "store" / "smoke", read_receipt(EVIDENCE / "smoke/one_gpu/te2.20.2-h200-smoke_small_delayed.json.xz"))
    for day, seconds in (("19", 5.0), ("20", 6.0)):
        changed = replace(imports_of(STACK), started=f"2026-11-{day}T00:00:00+00:00", seconds={"probe": seconds})
        add(folder / "store" / "earlier" / day, changed)
    return folder / "site", make_site(catalog, folder / "store", folder / "site")


def test_every_link_leads_to_a_page_and_every_page_is_reached(site: tuple[Path, SiteResult]) -> None:
    folder, result = site
    pages = {path.relative_to(folder).as_posix(): Page(path.read_text()) for path in folder.rglob("*.html")}
    assert len(pages) == result.pages
    seen, ahead = {"index.html"}, ["index.html"]
    while ahead:
        here = ahead.pop()
        for link in pages[here].links:
            parts = urlsplit(link)
            name = posixpath.normpath(posixpath.join(posixpath.dirname(here), parts.path)) if parts.path else here
            assert name in pages, (here, link)
            if name not in seen:
                seen.add(name)
                ahead.append(name)
    assert seen == pages.keys()
    assert {cell.page for cell in result.cells} <= pages.keys()
    for page in pages.values():
        assert ("html", {"lang": "en"}) in page.tags
        assert sum(tag == "h1" for tag, _ in page.tags) == 1
        assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in page.tags}


def test_pages_answer(site: tuple[Path, SiteResult]) -> None:
    assert [[one.module for one in step.culprits] for step in site[1].steps] == [[], ["attention"]]
    for page, words in {
        "index.html": (
            "te2.20.2 on h200 does not hold: linear_walker (no receipt)", "0 of 3 releases hold in every module",
            "attention (environment: cuDNN)", "This table scrolls sideways.", "native_block", "tokens/s",
        ),
        "cell/te2.17.1-h200-attention.html": (
            "CUDNN_STATUS_BAD_PARAM", "All 63 checks", "has a second copy", "libcudnn", "at most", "Backends",
        ),
        f"cell/{CELL}.html": ("earlier/19", "earlier/20"),
    }.items():  # fmt: skip
        text = text_of(site[0], page)
        assert [word for word in words if word not in text] == [], page
    assert "<svg " in (site[0] / "cell/te2.20.2-h200-smoke_small_delayed.html").read_text()


def test_what_is_lost_or_doubted_is_never_good(catalog: Catalog, tmp_path: Path) -> None:
    store = tmp_path / "store"
    add(store / "a", imports_of(STACK))
    red = imports_of("te2.14.1")
    add(store / "z", replace(red, stack=STACK, cell=CELL, started=""))
    add(store / "a", replace(red, started="2026-11-20T00:00:00+00:00"))
    (store / "a" / "te2.21.0-h200-imports.json").write_text('{"cell": "te2.21.0-h2')
    lies = add(store / "a", read_receipt(EVIDENCE / "h200" / STACK / f"{STACK}-h200-permute.json.xz"))
    data = json.loads(lies.read_text())
    part = next(part for check in data["checks"] for part in check["parts"])
    part |= {"observed": 7e9, "bound": 0.5, "passed": True}
    lies.write_text(json.dumps(data))
    result = make_site(catalog, store, tmp_path / "site")
    cells = {cell.cell: cell for cell in result.cells}
    assert (cells[CELL].outcome, cells[CELL].doubt) == (Outcome.PASS, "another receipt is red")
    assert {"a/te2.21.0-h200-imports.json", f"a/{STACK}-h200-permute.json"} <= result.unreadable.keys()
    text = text_of(tmp_path / "site", "index.html")
    assert "○ pass, another receipt is red" in text
    assert "holds in every" not in text
    # Nothing else is blamed for a doubt, and no step with one breaks nothing.
    assert [(step.before, step.after, CELL in step.lost) for step in result.steps] == [("te2.14.1", STACK, True)]
    assert CELL in render_markdown(describe_site(result))


def test_a_site_replaces_its_own_pages_and_nothing_else(tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_site(site, {"index.html": "old", "cell/a.html": "old"})
    (site / "notes.html").write_text("precious")
    write_site(site, {"index.html": "new"})
    assert {path.name for path in site.rglob("*") if path.is_file()} == {"index.html", "notes.html", MARK}
    assert (site / "index.html").read_text() == "new"
    with pytest.raises(WrongArguments, match="notes"):
        write_site(site, {"index.html": "newer", "notes.html": "new"})
    assert [(site / name).read_text() for name in ("index.html", "notes.html")] == ["new", "precious"]
