"""Small damage to real shared libraries: one name in the dynamic string table is changed, nothing else.

The result is what a library built against another release of its neighbours looks like to the loader, and it
needs no compiler. Only 64-bit little-endian ELF files are read, which is what Transformer Engine ships.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_DYNAMIC, _DYNSYM = 6, 11  # section types
_NEEDED = 1  # tag of an entry in the dynamic section
_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_TAG = struct.Struct("<qQ")


class NotDamageable(RuntimeError):
    """The file has nothing of the kind that was to be damaged; the text says what was looked for."""


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


def rename_needed(library: Path, *prefixes: str) -> tuple[str, str]:
    """Make a library need one that exists nowhere: `libX.so.13` becomes `libX.so.99`. Returns both names."""
    image = bytearray(library.read_bytes())
    found = [(start, _string(image, start)) for start in _needed(image)]
    start, name = _first_of(found, prefixes, f"{library.name} needs no library whose name starts with")
    return _overwrite(library, image, start, name, name[:-2] + "99")


def rename_undefined(library: Path, *prefixes: str) -> tuple[str, str]:
    """Make a library want a symbol that nothing defines. Returns what it wanted and what it wants now."""
    image = bytearray(library.read_bytes())
    found = [(start, _string(image, start)) for start in _undefined(image)]
    start, name = _first_of(found, prefixes, f"{library.name} wants no symbol that starts with")
    return _overwrite(library, image, start, name, name[:-1] + ("Q" if name[-1] != "Q" else "Z"))


def rename_string(library: Path, name: str) -> tuple[str, str]:
    """Change the last letter of a constant string: the function that pybind11 registers under it is gone."""
    image = bytearray(library.read_bytes())
    start = image.find(b"\0" + name.encode() + b"\0")
    if start < 0:
        raise NotDamageable(f"{library.name} holds no string {name!r}")
    return _overwrite(library, image, start + 1, name, name[:-1] + "_")


def _first_of(found: list[tuple[int, str]], prefixes: Sequence[str], nothing: str) -> tuple[int, str]:
    for prefix in prefixes:
        for start, name in found:
            if name.startswith(prefix):
                return start, name
    raise NotDamageable(f"{nothing} {' or '.join(prefixes)}")


def _overwrite(library: Path, image: bytearray, start: int, old: str, new: str) -> tuple[str, str]:
    image[start : start + len(old)] = new.encode()
    mode = library.stat().st_mode
    library.unlink()  # never through a link into the real install
    library.write_bytes(image)
    library.chmod(mode)
    return old, new


def _sections(image: bytearray) -> list[_Section]:
    if image[:6] != b"\x7fELF\x02\x01":
        raise NotDamageable("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry, count = struct.unpack_from("<HH", image, 0x3A)
    headers = (_HEADER.unpack_from(image, table + index * entry) for index in range(count))
    return [_Section(kind, offset, size, link) for _, kind, _, _, offset, size, link, *_ in headers]


def _needed(image: bytearray) -> Iterator[int]:
    sections = _sections(image)
    for section in sections:
        if section.kind == _DYNAMIC:
            strings = sections[section.link].offset
            for at in range(section.offset, section.offset + section.size, _TAG.size):
                tag, value = _TAG.unpack_from(image, at)
                if tag == _NEEDED:
                    yield strings + value


def _undefined(image: bytearray) -> Iterator[int]:
    sections = _sections(image)
    for section in sections:
        if section.kind == _DYNSYM:
            strings = sections[section.link].offset
            for at in range(section.offset, section.offset + section.size, _SYMBOL.size):
                name, info, _, home, _, _ = _SYMBOL.unpack_from(image, at)
                if name and home == 0 and info >> 4 == 1:  # undefined and global: a weak one may stay undefined
                    yield strings + name


def _string(image: bytearray, start: int) -> str:
    return image[start : image.index(0, start)].decode("ascii", errors="replace")
