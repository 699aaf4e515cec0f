"""What the pages show is what a command wrote, and where they point there is something."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))

from pages import PAGES, VERBS  # noqa: E402
from shown import read_pages, render_page  # noqa: E402

SHOWN = read_pages(ROOT)
WRITTEN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_a_page_shows_the_files_as_they_were_written(page: Path) -> None:
    text = page.read_text()
    assert text == render_page(text, ROOT, page.parent), "run `python ci/shown.py`"


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md") and page not in VERBS])
def test_a_page_of_the_evidence_is_what_the_evidence_gives(page: str) -> None:
    assert (ROOT / "docs" / "examples" / page).read_text() == PAGES[page](), "run `python ci/pages.py`"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = page if not path else page.parent / path
        assert target.exists(), path
        if anchor:
            assert anchor in anchors_of(target), f"{path}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_figure_that_is_no_longer_the_files_is_seen_and_put_right(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("now: 2\n")
    page = "before\n<!-- from f.txt -->\n```text\nnow: 1\n```\n<!-- end -->\nafter\n"
    right = page.replace("1", "2")
    assert [render_page(text, tmp_path, tmp_path) for text in (page, right)] == [right, right]
    with pytest.raises(FileNotFoundError):
        render_page(page.replace("f.txt", "g.txt"), tmp_path, tmp_path)


def test_a_link_leads_from_the_page_to_where_it_leads_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "docs" / "examples").mkdir(parents=True)
    (tmp_path / "docs" / "examples" / "f.md").write_text("[a](../e.json) [b](g.md#h) [c](#d) [e](https://e)\n")
    page = "<!-- from docs/examples/f.md -->\n<!-- end -->"
    shown = render_page(page, tmp_path, tmp_path).splitlines()[1]
    assert shown == "[a](docs/e.json) [b](docs/examples/g.md#h) [c](#d) [e](https://e)"
    shown = render_page(page, tmp_path, tmp_path / "docs").splitlines()[1]
    assert shown == "[a](e.json) [b](examples/g.md#h) [c](#d) [e](https://e)"
