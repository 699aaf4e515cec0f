"""Files that commands wrote, shown in the pages: `python ci/shown.py` puts each block as its file is now.

A block stands between `<!-- from FILE -->` and `<!-- end -->`; a `.txt` file is shown as text, all else as Markdown,
whose links lead from the page to where they lead from the file.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"<!-- from (?P<source>\S+) -->\n.*?<!-- end -->", re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|[#/])([^)#\s]+)")  # relative ones, up to an anchor


def read_pages(root: Path) -> list[Path]:
    """The pages that may show files: the README, and those of `docs`."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def render_page(text: str, root: Path, folder: Path) -> str:
    """The page with every block as its file says now.

    Args:
        text: of the page.
        root: that the names of files are relative to.
        folder: that the page lies in.

    Raises:
        FileNotFoundError: a page shows a file that is not there.
    """

    def show(match: re.Match[str]) -> str:
        source = match["source"]
        written = (root / source).read_text(encoding="utf-8").strip("\n")
        inside = f"```text\n{written}\n```" if source.endswith(".txt") else lead(written, (root / source).parent)
        return f"<!-- from {source} -->\n{inside}\n<!-- end -->"

    def lead(written: str, there: Path) -> str:
        return _LINK.sub(lambda link: f"]({os.path.relpath(there / link[1], folder)}", written)

    return _BLOCK.sub(show, text)


def main() -> int:
    """Write the pages that show another text than their files have."""
    for page in read_pages(ROOT):
        text = page.read_text(encoding="utf-8")
        if (shown := render_page(text, ROOT, page.parent)) != text:
            page.write_text(shown, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
