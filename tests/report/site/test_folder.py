"""A site replaces nothing but a site, and is whole or as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.errors import WrongArguments
from megacpp_validate.report.site.cells import name_page
from megacpp_validate.report.site.folder import MARK, require_site, write_site


def test_a_site_is_replaced_whole(tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_site(site, {"index.html": "old", "cell/a.html": "old"})
    assert write_site(site, {"index.html": "new"}) == len("new") + len("index.html\n")
    assert {path.name for path in site.rglob("*")} == {"index.html", MARK}
    assert list(tmp_path.iterdir()) == [site]


@pytest.mark.parametrize("name", ["notes.html", "cell/notes.txt", "link"])
def test_what_no_report_wrote_stays(name: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_site(site, {"index.html": "old"})
    (site / "cell").mkdir()
    if name == "link":
        (site / name).symlink_to(tmp_path)
    else:
        (site / name).write_text("precious")
    with pytest.raises(WrongArguments, match=name):
        write_site(site, {"index.html": "new"})
    assert (site / "index.html").read_text() == "old"
    assert (site / name).exists()


def test_no_other_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "."):
        with pytest.raises(WrongArguments, match="Next step"):
            write_site(tmp_path / name, {"index.html": "new"})
    (tmp_path / "empty").mkdir()
    write_site(tmp_path / "empty", {"index.html": "new"})


def test_a_write_that_fails_leaves_the_old_site(tmp_path: Path) -> None:
    write_site(tmp_path / "site", {"index.html": "old"})
    with pytest.raises(OSError, match="name too long"):
        write_site(tmp_path / "site", {"index.html": "new", f"{'x' * 400}.html": "new"})
    assert (tmp_path / "site" / "index.html").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "site"]


def test_a_move_that_fails_puts_the_old_site_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_site(tmp_path / "site", {"index.html": "old"})
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("no move")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no move"):
        write_site(tmp_path / "site", {"index.html": "new"})
    assert (tmp_path / "site" / "index.html").read_text() == "old"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..", "/etc/passwd", "C:\\x", "a/b", "\udce9", "", ".", "-rf", "CON", "x" * 400, "<b>"]
)
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    page = name_page("cell", name)
    write_site(tmp_path / "site", {page: "text"})
    assert (tmp_path / "site" / page).resolve().is_relative_to(tmp_path / "site" / "cell")
    assert page != name_page("cell", f"{name}x")


def test_the_output_holds_nothing_that_the_report_needs(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for place in (site, site / "gate.json", site / "a" / ".." / "b"):
        with pytest.raises(WrongArguments, match="Next step"):
            require_site(site, [place])
    require_site(site, [tmp_path, tmp_path / "site2"])
