"""The report site in a real browser, from disk: links, scripts, phones, print, and nothing asked of any network.

Pictures of the main pages are written where MEGACPP_SCREENSHOTS names a folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.test_selftest import ASTRAY, CLEAN, GOOD, SURVIVOR

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.report import machine
from megacpp_validate.report.site.paths import cell_page, step_page, target_page
from tests.report.browser import Tab, find_chromium, run_chromium
from tests.report.site_stores import EVIDENCE, NOW, copy_store, make_site
from tests.report.test_site import MAIN, closed_gate

PHONE = 360  # CSS pixels: the narrowest phones in use
# What sticks out of the window and is not in a box that scrolls by itself.
STICKS_OUT = """[...document.querySelectorAll("main *, nav *")].filter(
  element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    && !element.closest(".wide, .site-grid, .picture, pre")
).map(element => element.outerHTML.slice(0, 120))"""
CELL = cell_page("te2.17.1-h200-attention")
PAGES = (*(f"{name}.html" for name in MAIN), CELL, step_page("h200", "te2.14.1", "te2.17.1"), target_page("h200"))


@pytest.fixture(scope="module")
def site(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browsed")
    store = copy_store(folder / "store")
    score = CLEAN.__class__(CLEAN.modules, (GOOD, SURVIVOR, ASTRAY), clean_runs=200)
    (store / "score.json").write_text(machine.to_json(score))
    (folder / "decision.json").write_text(closed_gate().model_dump_json())
    make_site(catalog, store, folder / "site #1?", folder / "decision.json")  # a folder of any name
    return folder / "site #1?"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    program = find_chromium()
    if program is None:
        pytest.skip("not-run: no chromium")
    with run_chromium(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser.tab()


@pytest.fixture(autouse=True)
def fresh(tab: Tab) -> Iterator[None]:
    """A window of a desktop, and a page that says nothing and asks for nothing but files."""
    tab.resize(1200)
    tab.take_medium()
    tab.said.clear()
    tab.asked.clear()
    yield
    assert tab.said == []
    assert [url for url in tab.asked if not url.startswith(("file:", "data:"))] == []


def test_a_cell_of_the_grid_leads_to_its_receipt(tab: Tab, site: Path) -> None:
    tab.open(site / "index.html")
    tab.follow(f'a.cell[href="{CELL}"]')
    assert tab.look("document.title") == "te2.17.1-h200-attention: error"
    assert "CUDNN_STATUS_BAD_PARAM" in tab.look("document.querySelector('main').innerText")
    assert tab.look("getComputedStyle(document.querySelector('.answer')).display") == "flex"  # its style was loaded
    tab.follow("nav a[href$='index.html']")
    assert tab.look("document.querySelector('h1').innerText").startswith("Does the bridge")


@pytest.mark.parametrize("page", PAGES)
def test_nothing_sticks_out_on_a_phone(page: str, tab: Tab, site: Path) -> None:
    tab.resize(PHONE, 700, phone=True)
    tab.open(site / page)
    tab.look("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert tab.look(STICKS_OUT) == []
    assert tab.look("document.documentElement.scrollWidth") <= PHONE
    assert tab.look("Math.min(...[...document.querySelectorAll('nav a')].map(a => a.offsetHeight))") >= 24


def test_any_two_environments_side_by_side(tab: Tab, site: Path) -> None:
    tab.open(site / "environments.html")
    rows = "document.querySelectorAll('#compared tbody tr').length"
    assert tab.look("document.getElementById('chooser').hidden") is False
    differing = tab.look(rows)
    assert f"{differing} of" in tab.look("document.getElementById('told').innerText")
    assert "2.17.1" in tab.look("document.getElementById('compared').innerText")
    tab.look("document.getElementById('only').click()")
    assert tab.look(rows) > differing
    tab.look("(after.selectedIndex = before.selectedIndex, after.dispatchEvent(new Event('change')))")
    assert "these two are the same" in tab.look("document.getElementById('told').innerText")


def test_without_a_script_adjacent_releases_are_there(tab: Tab, site: Path) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(site / "environments.html")
        hidden = "getComputedStyle(document.getElementById('chooser')).display"
        assert tab.look(hidden) == "none"
        assert "te2.17.1 → te2.20.2" in tab.look("document.querySelector('#pair-1').innerText")
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)


def test_in_print_and_in_the_dark(tab: Tab, site: Path) -> None:
    tab.open(site / CELL)
    tab.take_medium("print")
    assert tab.look("getComputedStyle(document.querySelector('nav.site')).display") == "none"
    assert tab.look("getComputedStyle(document.querySelector('.wide')).overflowX") == "visible"
    assert tab.print().startswith(b"%PDF")
    light = tab.look("getComputedStyle(document.body).backgroundColor")
    tab.take_medium(dark=True)
    assert tab.look("getComputedStyle(document.body).backgroundColor") != light
    # Marks hold a word beside the colour, wherever there is one.
    bare = "[...document.querySelectorAll('.badge, a.cell')].filter(one => !/[a-z]{3}/.test(one.textContent)).length"
    assert tab.look(bare) == 0


def test_with_the_keyboard_alone(tab: Tab, site: Path) -> None:
    tab.open(site / "index.html")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert tab.look("document.activeElement.textContent") == "To the content"
    assert tab.look("document.activeElement.getBoundingClientRect().left") >= 0
    # What scrolls sideways can be reached and moved without a mouse.
    scrolls = "[...document.querySelectorAll('.wide, .site-grid, .picture')].every(box => box.tabIndex === 0)"
    assert tab.look(scrolls) is True


def test_markup_in_a_name_does_nothing(tab: Tab, catalog: Catalog, tmp_path: Path) -> None:
    from megacpp_validate.evidence.receipt import Outcome
    from tests.report.test_site_hostile import add, evil_receipt, replace

    name = "te1.0<img src=x onerror=alert(1)><script>alert(1)<"
    receipt = replace(
        evil_receipt(Outcome.FAIL), cell=f"{name}-h200-imports", stack=name, target="h200", probe="imports"
    )
    add(tmp_path / "store", receipt)
    make_site(catalog, tmp_path / "store", tmp_path / "site")
    for page in sorted((tmp_path / "site").rglob("*.html")):
        tab.open(page)
        assert tab.look("document.querySelectorAll('img, main script, b[onclick]').length") == 0
    assert tab.look("document.images.length") == 0


@pytest.mark.skipif("MEGACPP_SCREENSHOTS" not in os.environ, reason="not-run: MEGACPP_SCREENSHOTS names no folder")
def test_pictures_of_the_main_pages(tab: Tab, catalog: Catalog, tmp_path: Path) -> None:
    """Of the committed evidence, and of the decisions that lie beside the tests' caller."""
    gates = [Path(name) for name in os.environ.get("MEGACPP_GATES", "").split(":") if name]
    make_site(catalog, EVIDENCE, tmp_path / "site", *gates, made_at=NOW)
    folder, names = (
        Path(os.environ["MEGACPP_SCREENSHOTS"]),
        dict(zip(("cell", "step"), PAGES[len(MAIN) :], strict=False)),
    )
    names |= {name: f"{name}.html" for name in ("index", "training", "environments", "gate")}
    for name, page in names.items():
        tab.resize(1000, 800)
        tab.open(tmp_path / "site" / page)
        if name == "training":
            tab.look("document.querySelector('#run-4').scrollIntoView()")
        tab.picture(folder / f"{name}.png")
    tab.resize(PHONE, 720, phone=True)
    for name in ("index", "cell"):
        tab.open(tmp_path / "site" / names[name])
        tab.picture(folder / f"{name}-phone.png")
    tab.resize(1000, 800)
    tab.take_medium(dark=True)
    tab.open(tmp_path / "site" / "index.html")
    tab.picture(folder / "index-dark.png")
    assert all(path.stat().st_size <= 150_000 for path in folder.glob("*.png"))
