"""What a bundle says of itself: `bundle.json` with every file by size and hash, and `SHA256SUMS` for other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ...evidence.whole_file import write_whole
from .archive import FILE
from .parts import Part
from .restore.listing import MANIFEST, SCHEMA, SIGNATURE, SUMS
from .restore.reading import hash_file

KINDS: Final = {
    "image": "image.tar", "wheel": "wheelhouse/", "jit": "jit/", "matrix": "matrix/", "signature": "signatures/",
    "sbom": "sbom.spdx.json", "provenance": "provenance.json", "licences": "licences.json", "lock": "lock.txt",
    "key": "cosign.pub", "restore": "restore.py", "words": "README.txt",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A file of the bundle: whole, or as parts that follow each other.

    Attributes:
        path: as it is restored.
        kind: a key of `KINDS`.
        bytes: of all of it.
        sha256: of all of it; empty where it lies in parts, which have their own.
        parts: in order; none for a file that lies there whole.
        mtime_ns: when a file of JIT caches was written, which ninja asks for; 0 for all others.
    """

    path: str
    kind: str
    bytes: int
    sha256: str
    parts: tuple[Part, ...] = ()
    mtime_ns: int = 0


@dataclass(frozen=True)
class Manifest:
    """The whole of `bundle.json`.

    Attributes:
        python: that the wheels are for.
        image: name, digest and digests of configurations; none for a bundle without an image.
        lock: SHA-256 of the lock.
        wheels_absent: packages of the lock that have no wheel.
        absent: what the bundle does not hold -> why.
    """

    tool: str
    made: str
    target: str
    platform: str
    python: str
    image: Mapping[str, Any] | None
    lock: str
    part_bytes: int
    wheels_absent: tuple[str, ...]
    absent: Mapping[str, str]
    files: tuple[Stored, ...] = field(default=())

    def text(self) -> str:
        """As it is written: keys sorted, so that the same bundle has the same id."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True) + "\n"


def kind_of(path: str) -> str:
    """What a file of a bundle is."""
    return next(
        kind for kind, start in KINDS.items() if path == start or (start.endswith("/") and path.startswith(start))
    )


def hash_files(root: Path, most: int, done: Sequence[Part]) -> tuple[Stored, ...]:
    """Every file under a folder, those over the size of a part cut into parts.

    Args:
        root: the bundle as it is written.
        most: bytes of a part.
        done: parts of the image, which were hashed when they were written.

    Raises:
        OSError: a file cannot be read or cut.
    """
    whole: dict[str, list[Part]] = {}
    for part in done:
        whole.setdefault(FILE, []).append(part)
    written, times = {part.path for part in done}, dict[str, int]()
    for place in sorted(path for path in root.rglob("*") if path.is_file()):
        path = place.relative_to(root).as_posix()
        if path not in written:
            if path.startswith(KINDS["jit"]):
                times[path] = place.stat().st_mtime_ns
            whole[path] = _cut(root, path, most)
    found = []
    for name, pieces in whole.items():
        kind = kind_of(name)
        alone = len(pieces) == 1 and pieces[0].path == name
        size = sum(piece.bytes for piece in pieces)
        found.append(
            Stored(
                name, kind, size, pieces[0].sha256 if alone else "", () if alone else tuple(pieces), times.get(name, 0)
            )
        )
    return tuple(found)


def _cut(root: Path, path: str, most: int) -> list[Part]:
    """A file as parts of at most so many bytes, cut from its end: the disk never holds more than one of them twice."""
    place = root / path
    size = place.stat().st_size
    cut = []
    if size > most:
        for number in range(-(-size // most) - 1, -1, -1):
            part = place.with_name(f"{place.name}.part{number:04d}")
            with place.open("r+b") as source, part.open("wb") as target:
                source.seek(number * most)
                while data := source.read(1 << 20):
                    target.write(data)
                target.flush()
                os.fsync(target.fileno())
                source.truncate(number * most)
            cut.append(part)
        place.unlink()
    pieces = [Part(one.relative_to(root).as_posix(), one.stat().st_size, hash_file(one, [])) for one in cut or [place]]
    return sorted(pieces, key=lambda piece: piece.path)


def write_lists(root: Path, manifest: Manifest, signature: str) -> None:
    """Write the manifest, its signature where there is one, and last the sums, without which it is no bundle.

    Raises:
        OSError: the disk does not take it.
    """
    write_whole(root / MANIFEST, manifest.text())
    own = [MANIFEST]
    if signature:
        write_whole(root / SIGNATURE, signature + "\n")
        own.append(SIGNATURE)
    parts = [part for row in manifest.files for part in (row.parts or (Part(row.path, row.bytes, row.sha256),))]
    lines = [f"{part.sha256}  {part.path}\n" for part in parts]
    lines += [f"{hash_file(root / name, [])}  {name}\n" for name in own]
    write_whole(root / SUMS, "".join(sorted(lines, key=lambda line: line[66:])))
