"""What others wrote is text on every page of the site, and no name of theirs leads out of its folder."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.report.test_hostile import SEEN, evil, evil_receipt, evil_smoke

from megacpp_validate.canary.dynamic.upgrade_result import (
    Change,
    Culprit,
    ModuleChange,
    StepResult,
    TimingChange,
    VersionChange,
)
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.release_gate import CellVerdict, GateDecision, GateRule
from megacpp_validate.evidence.store import ReceiptInvalid
from megacpp_validate.report.site import told as site_told
from megacpp_validate.report.site.folder import MARK, NotOurFolder, write_site
from megacpp_validate.report.site.paths import cell_page, is_page, step_page, target_page
from megacpp_validate.report.site.values import SiteFacts, SiteRow, arrange_stacks
from megacpp_validate.report.site.whole import SiteOverview, SiteSource, StackSeen, render_site
from tests.report.reading import Page
from tests.report.site_stores import NOW, add, make_site

ROOT = Path(__file__).parents[2]
SCRIPT = "<script>alert(1)</script>"
ESCAPES = ("../../etc/passwd", "..", "/etc/passwd", "C:\\x", "a/b", "\udce9", "", ".", "-rf", "CON", "x" * 400, SCRIPT)
RECEIPTS = {"imports": evil_receipt(Outcome.PASS), "attention": evil_receipt(Outcome.FAIL)} | {
    f"smoke_{evil('x')}": evil_smoke().receipts[1]
}


def evil_rows() -> Iterator[SiteRow]:
    for stack in (f"te2.1{evil('stack')}", f"te2.2{SCRIPT}../../etc"):
        for probe, receipt in RECEIPTS.items():
            for number in (1, 2):
                yield SiteRow(
                    run=evil("../../run"), cell=f"{stack}-{evil('target')}-{probe}", stack=stack, target=evil("target"),
                    probe=probe, outcome=receipt.outcome, started=f"2026-0{number}-01{evil('')}", path=evil("../path"),
                    sha256=evil("sha"), commit=evil("commit"), probe_seconds=1.0, contradicts=evil("other"),
                )  # fmt: skip


def evil_judge(target: str, older: StackSeen, newer: StackSeen) -> StepResult:
    culprit = Culprit(
        module=evil("module"), cause="api", component=evil("component"), signature=evil("s"), summary=evil("summary"),
        evidence=(evil("evidence"),), entry_points=(evil("entry"),), next_step=evil("next"), cascades=(evil("c"),),
    )  # fmt: skip
    row = ModuleChange(
        module=evil("module"), before=Outcome.PASS, after=None, change=Change.LOST, under=evil("under"),
        reason=evil("why"),
    )  # fmt: skip
    timing = TimingChange(
        module=evil("m"),
        name=evil("use"),
        before_ms=1,
        after_ms=2,
        ratio=2,
        noise=1.1,
        slower=True,
        derivation=evil("d"),
    )
    return StepResult(
        target=target, before=older.stack, after=newer.stack, modules=(row,), culprits=(culprit,), timings=(timing,),
        versions=(VersionChange(name=evil("v"), before=evil("a"), after=evil("b")),), lost={evil("cell"): evil("lost")},
    )  # fmt: skip


def evil_gate() -> GateDecision:
    cell = CellVerdict(
        cell="../../etc/passwd" + evil("cell"), run=evil("run"), required=True, closes=True, rules=(GateRule.MISSING,),
        reasons=(evil("reason"),), warnings=(evil("warning"),), waived_by=evil("owner"),
    )  # fmt: skip
    return GateDecision(
        tool=evil("tool"), release=evil("release"), stack=evil("stack"), target=evil("target"), open=False, exit_code=4,
        cells=(cell,), missing=(evil("cell"),), rules_sha256=evil("r"), receipts_sha256=evil("s"), judged_at=evil("at"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    rows = list(evil_rows())
    facts = SiteFacts(
        evil("store"), evil("tool"), NOW, ("imports", "attention"),
        arrange_stacks(rows, NOW, {rows[0].cell: [evil("file")]}), {evil("file"): evil("reason")},
        {evil("result"): evil("schema")}, gates=(evil_gate(),),
    )  # fmt: skip

    def read(row: SiteRow) -> object:
        receipt = RECEIPTS[row.probe]
        if row.probe == "attention" and row.stack.startswith("te2.2"):
            raise ReceiptInvalid(Path(evil("file").replace("\x00", "")), evil("invalid"))
        return replace(receipt, cell=row.cell, stack=row.stack, target=row.target, probe=row.probe)

    return dict(render_site(facts, SiteSource(read, evil_judge), SiteOverview()))


def test_what_others_wrote_is_text(pages: dict[str, str]) -> None:
    assert len([name for name in pages if name.startswith("cell/")]) == 6
    assert len([name for name in pages if name.startswith("step/")]) == 1
    for name, source in pages.items():
        assert is_page(name)
        if not name.endswith(".html"):
            continue
        page = Page(source)
        tags = [tag for tag, _ in page.tags]
        assert page.open == []
        assert "img" not in tags
        assert tags.count("script") == (2 if name == "environments.html" else 0)
        assert not any(key.startswith("on") or key == "style" for _, attributes in page.tags for key in attributes)
        assert not re.search(r"[\x00-\x08\x0b\x0e-\x1f\x85\u202e]", source)
        links = [attributes["href"] for _, attributes in page.tags if attributes.get("href")]
        assert all(re.fullmatch(r"data:,|#[\w-]+|(\.\./)?[a-z]*/?[a-z0-9._-]+", link) for link in links)
        if name != "score.html":
            assert SEEN.replace("`", "")[:24] in page.text, name


def test_the_data_of_the_page_cannot_end_its_element(pages: dict[str, str]) -> None:
    inside = pages["environments.html"].partition('id="environments">')[2].partition("</script>")[0]
    assert "<" not in inside
    assert any(SEEN[:12] in text for text in json.loads(inside)["texts"])


@settings(max_examples=60)
@given(st.text(max_size=80), st.text(max_size=80))
def test_no_name_leads_out_of_the_folder(one: str, other: str) -> None:
    for page in (cell_page(one), target_page(one), step_page(one, other, one)):
        assert is_page(page)
        assert len(page) < 100
    assert (cell_page(one) == cell_page(other)) == (one == other)
    assert step_page("a", "b", "c") != step_page("ab", "", "c")


@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_try(name: str) -> None:
    assert is_page(cell_page(name))
    assert not is_page(name)
    assert not is_page(f"{name}/../../x.html")


def test_a_page_that_leads_out_is_not_written(tmp_path: Path) -> None:
    write_site(tmp_path / "site", [("index.html", "old")])
    for path in ("../x.html", "/tmp/x.html", "a/b/c.html", "..html", ".x.html"):
        with pytest.raises(ValueError, match="no name of a page"):
            write_site(tmp_path / "site", [("index.html", "new"), (path, "x")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]
    assert (tmp_path / "site" / "index.html").read_text() == "old"


@pytest.mark.parametrize("what", ["folder", "file", "link", "dangling"])
def test_what_no_report_wrote_is_not_replaced(what: str, tmp_path: Path) -> None:
    place = tmp_path / "docs"
    if what == "folder":
        (place / "precious").mkdir(parents=True)
    elif what == "file":
        place.write_text("precious")
    else:
        place.symlink_to(tmp_path if what == "link" else tmp_path / "nowhere")
    with pytest.raises(NotOurFolder, match="Next step"):
        write_site(place, [("index.html", "new")])
    assert place.is_symlink() or place.is_file() or (place / "precious").is_dir()


def test_a_killed_report_leaves_the_old_site_whole(tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_site(site, [("index.html", "old"), ("cell/a.html", "old")])
    killed = (
        "import os, signal, sys; from pathlib import Path; from megacpp_validate.report.site.folder import write_site\n"
        "def pages():\n"
        "    yield 'index.html', 'new'\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_site(Path(sys.argv[1]), pages())\n"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(site)], cwd=ROOT, check=False)
    assert done.returncode < 0
    assert (site / "index.html").read_text() == (site / "cell" / "a.html").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2  # what the killed one had begun
    write_site(site, [("index.html", "newer")])
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert {path.name for path in site.iterdir()} == {"index.html", MARK}


def test_an_old_site_that_lies_aside_alone_comes_back(tmp_path: Path) -> None:
    write_site(tmp_path / ".site.999999999.old", [("index.html", "old")])
    with pytest.raises(ZeroDivisionError):
        write_site(tmp_path / "site", (("index.html", str(1 / number)) for number in (1, 0)))
    assert (tmp_path / "site" / "index.html").read_text() == "old"


def test_a_full_disk_leaves_the_old_site(tmp_path: Path) -> None:
    write_site(tmp_path / "site", [("index.html", "old")])

    def pages() -> Iterator[tuple[str, str]]:
        yield "index.html", "new"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_site(tmp_path / "site", pages())
    assert (tmp_path / "site" / "index.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_real_store_with_markup_for_names(catalog: Catalog, tmp_path: Path) -> None:
    name = "te1.0<b onclick=alert(1)>&amp;-"
    receipt = replace(
        evil_receipt(Outcome.FAIL), cell=f"{name}-h200-imports", stack=name, target="h200", probe="imports"
    )
    add(tmp_path / "store" / "<script>alert(1)<" / "script>", receipt)
    result = make_site(catalog, tmp_path / "store", tmp_path / "site")
    assert [cell.stack for cell in result.cells] == [name]
    for path in (tmp_path / "site").rglob("*.html"):
        assert not {"b", "img"} & ({tag for tag, _ in Page(path.read_text()).tags} - {"b"})
        assert "onclick" not in {key for _, attributes in Page(path.read_text()).tags for key in attributes}
    hostile = result.model_copy(update={"unreadable": {evil("file"): evil("reason")}})
    assert all(line.startswith("::") for line in site_told.render_site_annotations(hostile).splitlines())
    assert "<img" not in site_told.render_site_summary(hostile)
    assert site_told.render_site_junit(hostile).count("<testcase") == 2
