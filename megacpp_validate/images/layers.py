"""Files of an image read from its layers, as they come from the registry: no engine, and nothing is unpacked."""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, Final

from .contents import Contents, require_digest
from .refusals import RegistryLies

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
_MOST_FILE: Final = 4 << 20  # bytes: what is read here are lists and licences
_MOST_LINKS: Final = 8


class _Stream(io.RawIOBase):
    """A blob as a file that is read once, hashed on the way."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")
        self.hash = sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        if not self._rest:
            piece = next(self._pieces, b"")
            self.hash.update(piece)
            self._rest = memoryview(piece)
        size = min(len(room), len(self._rest))
        room[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def read_files(contents: Contents, layers: Sequence[str], wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Files of an image by path, without a leading `/`, as its last layer leaves them; links are followed.

    Args:
        contents: repository.
        layers: digests, lowest first.
        wanted: whether a path is of interest; asked of files, and of links for what they are called.

    Raises:
        RegistryUnreachable: the registry stopped.
        RegistryLies: a layer is not what its digest says, or no tar that can be read.
    """
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    for digest in layers:
        stream = _Stream(contents.blob(digest))
        try:
            _read_layer(stream, files, links, wanted)
            while stream.readinto(bytearray(1 << 20)):  # what lies behind the archive's end is hashed too
                pass
        except tarfile.TarError as fault:
            raise RegistryLies(
                f"the layer {digest} cannot be read: {fault}. Likely cause: it is packed with zstd, which this Python "
                "does not know, or damaged. Next step: build the image with gzip, which is what buildx takes by itself."
            ) from fault
        require_digest(digest, f"sha256:{stream.hash.hexdigest()}", f"{contents.host}/{contents.path}")
    for path in links:
        found = _follow(path, files, links)
        if found is not None and wanted(path):
            files[path] = found
    _see_through_folders(files, links)
    return files


def _read_layer(stream: _Stream, files: dict[str, bytes], links: dict[str, str], wanted: Callable[[str], bool]) -> None:
    own: set[str] = set()  # an opaque folder hides what lies below it, and not what comes with it
    with tarfile.open(fileobj=io.BufferedReader(stream, 1 << 20), mode="r|*") as archive:
        for member in archive:
            path = posixpath.normpath(member.name).lstrip("/")
            folder, name = posixpath.split(path)
            if name == _OPAQUE:
                _remove(files, links, f"{folder}/", own)
            elif name.startswith(_WHITEOUT):
                gone = posixpath.join(folder, name.removeprefix(_WHITEOUT))
                _remove(files, links, gone, own)
                _remove(files, links, f"{gone}/", own)
            else:
                own.add(path)
                links.pop(path, None)
                files.pop(path, None)
                if member.issym() or member.islnk():
                    target = member.linkname if member.islnk() else posixpath.join(folder, member.linkname)
                    links[path] = posixpath.normpath(target).lstrip("/")
                elif member.isfile() and wanted(path) and member.size <= _MOST_FILE:
                    held = archive.extractfile(member)
                    files[path] = held.read() if held is not None else b""


def _remove(files: dict[str, bytes], links: dict[str, str], start: str, own: set[str]) -> None:
    for held in (files, links):
        for path in [
            one for one in held if one not in own and (one == start or (start[-1:] == "/" and one.startswith(start)))
        ]:
            del held[path]


def _follow(path: str, files: dict[str, bytes], links: dict[str, str]) -> bytes | None:
    for _ in range(_MOST_LINKS):
        if path not in links:
            break
        path = links[path]
    return files.get(path)


def _see_through_folders(files: dict[str, bytes], links: dict[str, str]) -> None:
    """Debian lets /usr/share/doc/PACKAGE lead to that of another package."""
    for link, target in links.items():
        for path in [one for one in files if one.startswith(f"{target}/")]:
            files.setdefault(link + path[len(target) :], files[path])
