"""Every byte of a bundle: hashed once, copied on the way, and read as whole files."""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .listing import MANIFEST, refuse_faults, stored_files

CHUNK = 1 << 18  # bytes: so many that Python does not count, and so few that they stay in a core's cache


def verify(
    root: Path,
    bundle: dict[str, Any],
    jobs: int,
    copies: Mapping[str, list[tuple[Path, int]]] | None = None,
) -> None:
    """Hash every file, several at a time, and write on the way what is wanted elsewhere: one reading serves both.

    Args:
        root, bundle: the folder, and what `read_bundle` gave.
        jobs: threads; reading, hashing and writing let each other go.
        copies: by path of a stored file: the files that it is written to, and the offset in each.

    Raises:
        Refused: a file has another sha256 than the manifest says.
        OSError: one cannot be read, or a copy not written.
    """

    ended = threading.Event()

    def look(row: dict[str, Any]) -> list[str]:
        digest = hash_file(root / row["path"], (copies or {}).get(row["path"], []), ended)
        same = digest == row["sha256"]
        return [] if same else [f"{row['path']}: its sha256 is not the one of {MANIFEST}: a bit or more is another"]

    rows = sorted(stored_files(bundle).values(), key=lambda row: -row["bytes"])
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            refuse_faults(root, [fault for faults in pool.map(look, rows) for fault in faults])
        except BaseException:  # an interrupt too: nobody waits for gigabytes that are not wanted
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def hash_file(path: Path, copies: list[tuple[Path, int]], ended: threading.Event | None = None) -> str:
    """The sha256 of a file, which is written to an offset of others on the way; a link is not followed.

    Once `ended` is set it stops where it is.
    """
    digest, place, outs = hashlib.sha256(), 0, []
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        room = memoryview(bytearray(max(1, min(CHUNK, os.fstat(source).st_size))))
        outs += [(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), start) for to, start in copies]
        while not (ended and ended.is_set()) and (size := os.readv(source, [room])):
            digest.update(room[:size])
            for out, start in outs:
                _write_all(out, room[:size], start + place)
            place += size
    finally:
        for opened in (source, *(out for out, _ in outs)):
            os.close(opened)
    return digest.hexdigest()


def _write_all(out: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(out, data, place)
        data, place = data[written:], place + written


class Whole(io.RawIOBase):
    """A file of the bundle as one stream, whatever its parts: nothing is joined on the disk."""

    def __init__(self, root: Path, row: dict[str, Any]) -> None:
        self._parts = [(root / one["path"], one["bytes"]) for one in row["parts"] or [row]]
        self._at = 0
        self._open: tuple[Path, io.FileIO] | None = None
        self.size = sum(size for _, size in self._parts)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def readinto(self, room: Any) -> int:
        """Fill it with what the part has in which the place lies."""
        start = 0
        for path, size in self._parts:
            if start <= self._at < start + size:
                if self._open is None or self._open[0] != path:
                    self.let_go()
                    self._open = (path, io.FileIO(path))
                self._open[1].seek(self._at - start)
                got = self._open[1].readinto(room) or 0
                self._at += got
                return got
            start += size
        return 0

    def let_go(self) -> None:
        """Close the part that is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def close(self) -> None:
        """Close it all."""
        self.let_go()
        super().close()
