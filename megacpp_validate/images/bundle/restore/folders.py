"""Files of a bundle put into a folder: written aside while they are verified, and renamed when all are good."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .reading import CHUNK

_SEALS = ("manifest.json", "manifest.sha256")  # in the order in which the caches' own seal closes them


class NotTaken(Exception):
    """What the bundle is to be restored into does not take it."""


class NoRoom(OSError):
    """The disk is too small, said before anything is written."""


@contextmanager
def staged(bundle: dict[str, Any], wanted: dict[Path, str]) -> Iterator[dict[str, list[tuple[Path, int]]]]:
    """Where each stored file is copied to while it is verified; what was written is renamed into place at the end.

    Args:
        bundle: its manifest.
        wanted: by folder that shall be there: the part of the bundle that goes there, "" for all of it.

    Raises:
        NotTaken: a folder is there already and holds something else.
        NoRoom: the disk is too small for it.
        OSError: a folder cannot be written. What was written is removed, here and wherever the caller fails.
    """
    copies: dict[str, list[tuple[Path, int]]] = {}
    asides = {}
    try:
        for folder, prefix in wanted.items():
            rows = {row["path"][len(prefix) :]: row for row in bundle["files"] if row["path"].startswith(prefix)}
            if not rows:
                raise NotTaken(
                    f"the bundle has nothing under {prefix!r} for {folder}. Next step: leave that option out."
                )
            _require_folder(folder)
            if folder.exists() and any(folder.iterdir()):
                _hold_to(folder, rows)
                continue
            aside = asides[folder] = folder.with_name(f".{folder.name}.restoring")
            shutil.rmtree(aside, ignore_errors=True)  # of a restore that was killed
            make_folder(aside, folder)
            _ask_for_room(aside, sum(row["bytes"] for row in rows.values()))
            for name, row in rows.items():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                start = 0
                for one in row["parts"] or [row]:
                    copies.setdefault(one["path"], []).append((aside / name, start))
                    start += one["bytes"]
        yield copies
        for folder, aside in asides.items():
            for row in bundle["files"]:
                if row["mtime_ns"] and row["path"].startswith(wanted[folder]):
                    os.utime(aside / row["path"][len(wanted[folder]) :], ns=(row["mtime_ns"], row["mtime_ns"]))
            _seal_caches(aside, bundle, wanted[folder])
        os.sync()  # once for all: a name without its contents is what a power cut leaves
        for folder, aside in asides.items():
            if folder.exists():
                folder.rmdir()
            aside.rename(folder)
    finally:
        for aside in asides.values():
            shutil.rmtree(aside, ignore_errors=True)


def _require_folder(folder: Path) -> None:
    """What is there already may be a folder; a file is somebody's."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotTaken(
            f"{folder} is there, and is no folder. Nothing was installed. Next step: name another one, or move this "
            "away."
        )


def make_folder(new: Path, wanted: Path) -> None:
    """Make a folder and those above it.

    Raises:
        NotTaken: it cannot be made there, by this user or at all.
        OSError: the disk is full, or damaged.
    """
    try:
        new.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise NotTaken(
            f"{wanted} cannot be made: {fault.strerror} ({fault.filename}). Nothing was installed. Likely cause: a "
            "folder above it is somebody else's, read-only or a file. Next step: name another folder."
        ) from fault


def _hold_to(folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    """A folder that is there is left as it is, if it has what it should have."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    wrong = sorted(found ^ rows.keys())
    wrong += [name for name in sorted(found & rows.keys()) if not _is_same(folder / name, rows[name])]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise NotTaken(
            f"{folder} is there, and is not what the bundle holds: {', '.join(wrong[:3])}{more}. Nothing was "
            "installed. Likely cause: it has been used since, or is of another bundle. Next step: name another folder, "
            "or move this one away."
        )


def _is_same(path: Path, row: dict[str, Any]) -> bool:
    kind = path.lstat()
    if not stat.S_ISREG(kind.st_mode) or kind.st_size != row["bytes"]:
        return False
    with path.open("rb") as source:
        for one in row["parts"] or [row]:  # a file in parts has no sha256 of its own
            digest, left = hashlib.sha256(), one["bytes"]
            while data := source.read(min(CHUNK, left)):
                digest.update(data)
                left -= len(data)
            if digest.hexdigest() != one["sha256"]:
                return False
    return True


def _seal_caches(aside: Path, bundle: dict[str, Any], prefix: str) -> None:
    """Caches were sealed when they were bundled: read-only again, and what says so after all that it says it of."""
    names = [row["path"] for row in bundle["files"] if row["path"].startswith(prefix) and row["kind"] == "jit"]
    for path in sorted(names, key=lambda path: (*(path.endswith(f"/{seal}") for seal in _SEALS[::-1]), path)):
        place = aside / path[len(prefix) :]
        place.chmod(0o444)
        for folder in [*place.parents][: len(place.relative_to(aside).parts)]:  # Python 3.9 has no slices of it
            if folder != aside or prefix:  # containers read the caches as other users, whatever this one's mask is
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o555)


def _ask_for_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoRoom(
            f"{folder.parent} has {free} bytes free of the {needed} that it takes. Nothing was installed. Likely "
            "cause: the disk is full. Next step: make room, or name a folder on another disk."
        )
