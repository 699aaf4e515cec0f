"""What belongs to a store: its files, found without leaving one out. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """One place of a store.

    Attributes:
        key: its path below the store, as the file system's bytes.
        entry: of its folder; None where the place cannot be looked at.
        fault: why it cannot.
    """

    key: bytes
    entry: os.DirEntry[bytes] | None
    fault: str = ""


def walk_store(store: Path) -> Iterator[Place]:
    """Every `*.json` below a store, every link to no file, and every folder that cannot be read.

    Links are told and not followed, for what they point to is no part of the store; names that begin with a dot are
    files that are still being written, and folders that are not for evidence.

    Raises:
        OSError: the store itself cannot be read.
    """
    root, ahead = os.fsencode(store), [b""]  # a thousand folders in each other are no reason to fail
    while ahead:
        folder = ahead.pop()
        try:
            with os.scandir(root + b"/" + folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as fault:
            if not folder:
                raise
            yield Place(folder, None, f"the folder cannot be read: {fault.strerror or fault}")
            continue
        for entry in entries:
            if entry.name.startswith(b"."):
                continue
            key = folder + b"/" + entry.name if folder else entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(key)
                elif entry.name.endswith(b".json") or _is_odd_link(entry):
                    yield Place(key, entry)
            except OSError as fault:
                yield Place(key, None, f"it cannot be looked at: {fault.strerror or fault}")


def _is_odd_link(entry: os.DirEntry[bytes]) -> bool:
    """Whether an entry of a folder is a link to anything but a file: receipts may lie behind it that nobody reads.

    That is a link to a folder, but also to one that is not mounted today, that may not be entered, or whose name no
    file system takes: what it will be tomorrow is not known.
    """
    if not entry.is_symlink():
        return False
    try:
        return not entry.is_file()
    except OSError:  # no permission, a circle, a name that is too long
        return True
