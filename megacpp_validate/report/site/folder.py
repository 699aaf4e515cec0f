"""A site on disk: written aside and put in its place in one move, so that there is a whole one or the old one."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from .paths import is_page

MARK: Final = ".megacpp-site"  # says that a folder is a site, and may be replaced by the next one
_HEAD: Final = "A report site: the next report replaces this folder. Its pages:"
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class NotOurFolder(ValueError):
    """A folder that holds something else than a site: it is not replaced."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(
            f"{folder} {what}, and would be replaced whole. Likely cause: --output names the wrong folder. Next step: "
            "give a folder that is not there yet, or one that an earlier report wrote."
        )


def write_site(folder: Path, pages: Iterable[tuple[str, str]]) -> int:
    """Write every page, whatever dies half way; how many bytes they are.

    Args:
        folder: replaced whole if an earlier report wrote it.
        pages: path below it and text; written as they come.

    Raises:
        NotOurFolder: there is something else in it.
        ValueError: a path leads out of it.
        OSError: the place cannot be written.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - a link on the way stays one
    refuse_other_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    written: dict[str, int] = {}
    try:
        aside.mkdir()
        for path, text in pages:
            if not is_page(path):
                raise ValueError(f"{path!r} is no name of a page")
            target = aside / path
            target.parent.mkdir(exist_ok=True)
            # Half a character, as a file system may have it in a name, is written as its escape.
            written[path] = target.write_bytes(text.encode("utf-8", "backslashreplace"))
        listed = "".join(f"{path}\n" for path in sorted(written))
        (aside / MARK).write_text(f"{_HEAD}\n{listed}", encoding="utf-8")
        refuse_other_folder(folder)  # what came since the first look
        _put(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return sum(written.values())


def refuse_other_folder(folder: Path) -> None:
    """Refuse a place that holds what no report wrote.

    Raises:
        NotOurFolder: with what there is.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise NotOurFolder(folder, "is no folder")
    if not folder.is_dir():
        return
    if not (folder / MARK).is_file():
        if any(folder.iterdir()):
            raise NotOurFolder(folder, "holds what no report wrote")
        return
    if other := next(_find_others(folder), ""):
        raise NotOurFolder(folder, f"holds {other}, which no report wrote")


def refuse_inside(folder: Path, files: Iterable[Path]) -> None:
    """Refuse a place that holds what a report is made from, or what it is to write beside its pages.

    Raises:
        NotOurFolder: with the first one.
    """
    place = folder.resolve()
    for file in files:
        if file.resolve().is_relative_to(place):
            raise NotOurFolder(folder, f"holds {file}")


def _find_others(folder: Path) -> Iterator[str]:
    """Files of a site that are not on its list; one without a list, of an earlier version, has pages alone."""
    _, _, listed = (folder / MARK).read_text(encoding="utf-8", errors="replace").partition("\n")
    known = set(listed.splitlines())
    for place, folders, names in os.walk(folder):
        # A link to a folder is one more file that somebody put there.
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in (*names, *links):
            path = (Path(place) / name).relative_to(folder).as_posix()
            if path != MARK and not (path in known if known else is_page(path)):
                yield path


def _put(aside: Path, folder: Path) -> None:
    """Put the new folder in the place of the old one, which then lies aside.

    Raises:
        OSError: it cannot be moved.
    """
    if not folder.exists():
        aside.rename(folder)
    elif not _exchange(aside, folder):
        # Not in one move: where this is killed between the two, the next report puts the old one back.
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Two folders, exchanged in one move; False where this system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2  # glibc 2.28, musl 1.2.5
    except (AttributeError, OSError):
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False  # a file system, or a sandbox, without it
    raise OSError(number, os.strerror(number), str(other))


def _sweep(folder: Path) -> None:
    """Take away what reports left that were killed here; the old site comes back where one lies aside alone."""
    left = re.compile(rf"\.{re.escape(folder.name)}\.(\d+)\.(new|old)")
    for path in sorted(folder.parent.iterdir()):
        if not (match := left.fullmatch(path.name)) or _lives(int(match[1])):
            continue
        if match[2] == "old" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    return True
