"""A large file as parts of a stated size, written from a stream; what a killed writer left is taken up again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from ..contents import Contents, require_digest
from ..refusals import RegistryLies
from .archive import Segment

_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class Part:
    """A file of a bundle, or a piece of one.

    Attributes:
        path: in the bundle, with `/`.
        bytes: its size.
        sha256: of its content.
    """

    path: str
    bytes: int
    sha256: str


class Parts:
    """Where bytes go that follow each other: into files of at most `most` bytes, hashed on the way.

    A file that fits in one is one, under its own name.
    """

    def __init__(self, root: Path, path: str, total: int, most: int) -> None:
        self.root, self.path, self.most = root, path, most
        self.count = max(1, -(-total // most))
        self.done: list[Part] = []
        self._file: Any = None
        self._hash, self._size = sha256(), 0

    def names(self) -> Iterator[str]:
        """The names of the parts, in order."""
        return (self.path if self.count == 1 else f"{self.path}.part{place:04d}" for place in range(self.count))

    def left(self) -> int:
        """Bytes that an earlier writer left, up to the first that is not there."""
        total = 0
        for name in self.names():
            place = self.root / name
            size = place.stat().st_size if place.is_file() else 0
            total += size
            if size < self.most:
                break
        return total

    def keep(self, size: int) -> Iterator[bytes]:
        """The bytes that an earlier writer left, as they are read back and hashed; what lies behind is cut off."""
        while size:
            with self._name().open("rb") as file:
                while size and (data := file.read(min(_CHUNK, size, self.most - self._size))):
                    size -= len(data)
                    yield self._count(data)
            if self._size == self.most:
                self._end()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        rest = memoryview(data)
        while rest:
            if self._file is None:
                place = self._name()
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
                self._file = place.open("r+b", buffering=0)
                self._file.truncate(self._size)
                self._file.seek(self._size)
            piece = rest[: self.most - self._size]
            written = self._file.write(piece)
            self._count(piece[:written])
            rest = rest[written:]
            if self._size == self.most:
                self._end()

    def close(self) -> tuple[Part, ...]:
        """The parts, each whole and on the disk."""
        if self._size or not self.done:
            self.write(b"")
            if self._file is None:
                self._name().touch()
            self._end()
        return tuple(self.done)

    def let_go(self) -> None:
        """Close the file that is open, as it is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _name(self) -> Path:
        return self.root / list(self.names())[len(self.done)]

    def _count(self, data: Any) -> Any:
        self._hash.update(data)
        self._size += len(data)
        return data

    def _end(self) -> None:
        place = self._name()
        with place.open("r+b") as file:
            file.truncate(self._size)
            os.fsync(file.fileno())
        self.let_go()
        self.done.append(Part(place.relative_to(self.root).as_posix(), self._size, self._hash.hexdigest()))
        self._hash, self._size = sha256(), 0


def write_archive(
    root: Path, path: str, segments: Iterable[Segment], contents: Contents, most: int
) -> tuple[Part, ...]:
    """Write an archive, each blob held to its digest; what is there of it already is read back instead of fetched.

    Args:
        root, path: folder, and the file in it.
        segments: what it is made of.
        contents: where blobs come from.
        most: bytes of a part.

    Raises:
        RegistryUnreachable: the registry stopped; what was written stays for the next time.
        RegistryLies: a blob is not what its digest says; then nothing of the archive stays.
        OSError: the disk does not take it.
    """
    ordered = tuple(segments)
    total = sum(segment.size for segment in ordered)
    left = Parts(root, path, total, most).left()
    try:
        return _write(Parts(root, path, total, most), ordered, contents, left)
    except RegistryLies:
        _remove(Parts(root, path, total, most))
        if not left:
            raise
        # What was left may be what is wrong: a power cut leaves names without contents. The registry is asked again.
        return _write(Parts(root, path, total, most), ordered, contents, 0)


def _write(parts: Parts, segments: tuple[Segment, ...], contents: Contents, left: int) -> tuple[Part, ...]:
    old = _Old(parts.keep(left))
    try:
        for segment in segments:
            _write_segment(parts, segment, old, contents)
        if old.take(1):
            raise RegistryLies(f"{parts.path} is longer than the archive that it should be")
        return parts.close()
    finally:
        parts.let_go()


def _remove(parts: Parts) -> None:
    for name in parts.names():
        (parts.root / name).unlink(missing_ok=True)


class _Old:
    """What was there already, in the pieces that are asked for."""

    def __init__(self, kept: Iterator[bytes]) -> None:
        self._kept, self._rest = kept, b""

    def take(self, most: int) -> bytes:
        """Up to so many bytes; none where nothing is left."""
        if not self._rest:
            self._rest = bytes(next(self._kept, b""))
        data, self._rest = self._rest[:most], self._rest[most:]
        return data


def _write_segment(parts: Parts, segment: Segment, old: _Old, contents: Contents) -> None:
    digest, size = sha256(), 0
    while size < segment.size and (data := old.take(segment.size - size)):
        digest.update(data)
        size += len(data)
    rest: Iterable[bytes] = ()
    if size < segment.size:
        rest = contents.blob(segment.digest, size) if segment.body is None else (segment.body[size:],)
    for data in rest:
        digest.update(data)
        size += len(data)
        if size > segment.size:
            break
        parts.write(data)
    wanted = segment.digest or f"sha256:{sha256(segment.body or b'').hexdigest()}"
    shown = f"{contents.host}/{contents.path}"
    if size < segment.size:
        raise contents.stopped(segment.digest, size, segment.size)
    require_digest(wanted, f"sha256:{digest.hexdigest()}", shown)
