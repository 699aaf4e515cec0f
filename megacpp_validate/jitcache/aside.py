"""A folder for what is not whole yet: gone afterwards, and where its process was killed, when the next one is made."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_LOCK: Final = ".lock"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def folder_aside(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder PARENT/PREFIX...; on the file system of `parent`, so that a rename is enough to have what is in it.

    Args:
        parent: made where it is not there.
        prefix: of its name, and of those that were left.

    Raises:
        OSError: it cannot be made, or the disk is full.
    """
    parent.mkdir(parents=True, exist_ok=True)
    forget_the_dead(parent, prefix)
    aside = Path(tempfile.mkdtemp(prefix=prefix, dir=parent.absolute()))
    lock = _hold(aside)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def forget_the_dead(parent: Path, prefix: str) -> None:
    """Remove folders of this user's processes that were killed: nobody holds their locks.

    Only those of this boot of this machine: across machines a file system need not know of locks.
    """
    for place in parent.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        with suppress(OSError):  # another user's, or gone by now
            if place.parent.is_symlink() or place.parent.stat().st_uid != os.getuid():
                continue
            lock = os.open(place, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(lock, 100) == _read_boot():
                    shutil.rmtree(place.parent, ignore_errors=True)
            finally:
                os.close(lock)


def _hold(aside: Path) -> int | None:
    """Held as long as this process lives, and named once it is held: before, the folder would pass for a dead one's.

    Where there can be none (a full disk, a file system without locks), the folder is left to a person if it is left.
    """
    early = aside / f"{_LOCK}-to-be"
    lock = None
    try:
        lock = os.open(early, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, _read_boot())
        early.rename(aside / _LOCK)
    except OSError:
        if lock is not None:
            os.close(lock)
        with suppress(OSError):
            early.unlink()
        return None
    return lock


def _read_boot() -> bytes:
    """Raises `OSError` where the kernel does not tell."""
    return _BOOT.read_bytes().strip()
