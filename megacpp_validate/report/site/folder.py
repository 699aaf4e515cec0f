"""A report on disk: written beside its place, then moved there, so that a reader finds a whole one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ...errors import WrongArguments

MARK: Final = ".megacpp-site"  # the file that lists the pages of a report


def write_site(folder: Path, pages: Mapping[str, str]) -> int:
    """Write pages in place of an earlier report; bytes of all of them.

    Args:
        pages: path below the folder, as `name_page` makes it -> text.

    Raises:
        WrongArguments: the folder holds other files.
        OSError: the folder cannot be written.
    """
    require_site(folder)
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - a link on the way stays one
    folder.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        new, old = Path(place, "new"), Path(place, "old")
        for path, text in {**pages, MARK: "".join(f"{path}\n" for path in pages)}.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            size += (new / path).write_bytes(text.encode("utf-8", "backslashreplace"))
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    return size


def require_site(folder: Path, needed: Iterable[Path] = ()) -> None:
    """Refuse a folder that holds a file of somebody else, or a file that the report reads.

    Raises:
        WrongArguments: with the first such file.
    """
    inside = [file for file in needed if file.resolve().is_relative_to(folder.resolve())]
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        inside.append(folder)
    elif folder.is_dir():
        mark = folder / MARK
        known = mark.read_text(encoding="utf-8", errors="replace").splitlines() if mark.is_file() else []
        files = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
        inside += [path for path in files if path != mark and path.relative_to(folder).as_posix() not in known]
    if inside:
        raise WrongArguments(
            f"a report would replace {inside[0]}, which no report wrote. Likely cause: --output names the wrong "
            "folder. Next step: give a folder that does not exist, or one that an earlier report wrote."
        )
