"""A site on disk: written aside, then put in its place, so that a reader finds a whole one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Final

from ...errors import WrongArguments

MARK: Final = ".megacpp-site"  # says that a folder is a site, and lists its pages
_PAGE: Final = re.compile(r"(?:[a-z][a-z0-9_-]*/)?[a-z0-9][a-z0-9._-]*\.html")
_LONGEST: Final = 60


def name_page(folder: str, *words: str) -> str:
    """A page's path that a person recognises; a hash keeps it apart from every other, whatever the file system."""
    digest = sha256("\0".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:10]
    shown = re.sub(r"[^a-z0-9._]+|\.{2,}", "-", "-".join(words).lower())[:_LONGEST].strip("-._")
    return f"{folder}/{shown}-{digest}.html" if shown else f"{folder}/{digest}.html"


def write_site(folder: Path, pages: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Write every page as it comes; bytes by path.

    Args:
        folder: replaced whole if an earlier report wrote it.
        pages: path below the folder, and text.

    Raises:
        WrongArguments: there is something else in the folder.
        ValueError: a path leads out of it.
        OSError: the place cannot be written.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - a link on the way stays one
    require_site(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    written: dict[str, int] = {}
    try:
        aside.mkdir()
        for path, text in pages:
            if not _PAGE.fullmatch(path) or ".." in path:
                raise ValueError(f"{path!r} is no name of a page")
            (aside / path).parent.mkdir(exist_ok=True)
            written[path] = (aside / path).write_bytes(text.encode("utf-8", "backslashreplace"))
        (aside / MARK).write_text("".join(f"{path}\n" for path in sorted(written)), encoding="utf-8")
        require_site(folder)  # what came since the first look
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)
    return written


def require_site(folder: Path) -> None:
    """Refuse a place that holds what no report wrote.

    Raises:
        WrongArguments: with what there is.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise _refuse(folder, "is no folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / MARK).is_file():
        raise _refuse(folder, "holds what no report wrote")
    known = {*(folder / MARK).read_text(encoding="utf-8", errors="replace").splitlines(), MARK}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name not in known:
            raise _refuse(folder, f"holds {name}, which no report wrote")


def require_outside(folder: Path, files: Iterable[Path]) -> None:
    """Refuse a place that holds what a report is made from, or what it writes beside its pages.

    Raises:
        WrongArguments: with the first such file.
    """
    for file in files:
        if file.resolve().is_relative_to(folder.resolve()):
            raise _refuse(folder, f"holds {file}")


def _refuse(folder: Path, what: str) -> WrongArguments:
    return WrongArguments(
        f"{folder} {what}, and a report would replace the whole folder. Likely cause: --output names the wrong folder. "
        "Next step: give a folder that does not exist, or one that an earlier report wrote."
    )
