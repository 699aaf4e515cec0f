"""A shared library as the loader sees it: what it needs, what it wants, what it defines.

64-bit little-endian ELF, which is what every vendor ships for the targets. Only the dynamic segment is used where that
is enough: it is there in stripped files too. Source: the ELF specification, and the GNU hash table as glibc reads it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Final

_PROGRAM: Final = struct.Struct("<IIQQQQQQ")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_TAG: Final = struct.Struct("<qQ")
_RELOCATION: Final = struct.Struct("<QQq")
_LOAD, _DYNAMIC = 1, 2  # kinds of segments
_DYNSYM: Final = 11  # kind of section
_NEEDED, _PLT_SIZE, _HASH, _STRINGS, _SYMBOLS, _SONAME, _RPATH, _PLT, _BIND_NOW, _RUNPATH, _FLAGS = (
    1, 2, 4, 5, 6, 14, 15, 23, 24, 29, 30
)  # fmt: skip
_GNU_HASH, _VERSYM, _FLAGS_1, _VERNEED, _VERNEED_COUNT = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFB, 0x6FFFFFFE, 0x6FFFFFFF
_MOST: Final = 10_000_000  # symbols or links of a chain; more is a damaged file


class NotReadable(ValueError):
    """A file that is no shared library, or a damaged one; the text says what is wrong with it."""


@dataclass(frozen=True)
class Symbol:
    """A symbol that a library wants from others.

    Attributes:
        source: the library that it is expected from; empty where its version does not say.
        lazy: bound at the first call.
    """

    name: str
    source: str
    lazy: bool


class Elf:
    """One open file.

    Raises:
        NotReadable: at every use, where the file is not what it should be.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self.image = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as fault:
                raise NotReadable("the file is empty") from fault
        if self.image[:6] != b"\x7fELF\x02\x01":
            raise NotReadable("not a 64-bit little-endian ELF file")

    def __enter__(self) -> Elf:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None) -> None:
        self.image.close()
        if isinstance(fault, struct.error | IndexError | OverflowError):
            raise NotReadable(f"the file is damaged: {fault}") from fault

    @property
    def soname(self) -> str:
        """What others know it by; empty where it does not say."""
        return next(self._names(_SONAME), "")

    @property
    def needed(self) -> tuple[str, ...]:
        """Libraries that are loaded with it."""
        return tuple(self._names(_NEEDED))

    @property
    def search(self) -> tuple[Path, ...]:
        """Folders that it wants its libraries looked for in."""
        text = next(self._names(_RUNPATH), "") or next(self._names(_RPATH), "")
        origin = str(self.path.parent)
        entries = (entry.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for entry in text.split(":"))
        return tuple(Path(entry) for entry in entries if entry)

    def wants(self) -> Iterator[Symbol]:
        """Every symbol that must be found elsewhere; a weak one may stay undefined, and is left out."""
        sources, lazy = self._sources(), self._lazy()
        versions = self._at(_VERSYM)
        for number in range(1, self._count()):
            name, info, _, home, _, _ = _SYMBOL.unpack_from(self.image, self._symbols + number * _SYMBOL.size)
            if home or not name or info >> 4 != 1:
                continue
            version = struct.unpack_from("<H", self.image, versions + 2 * number)[0] & 0x7FFF if versions else 0
            yield Symbol(self._string(name), sources.get(version, ""), number in lazy)

    def defines(self, name: str) -> bool:
        """Whether others find this symbol in it."""
        table = self._at(_GNU_HASH)
        return name in self._defined if not table else self._look_up(table, name.encode())

    @cached_property
    def _tags(self) -> dict[int, list[int]]:
        table, _, _, _, size, count = struct.unpack_from("<QQIHHH", self.image, 0x20)
        headers = [_PROGRAM.unpack_from(self.image, table + index * size) for index in range(count)]
        self._loads = [(vaddr, length, offset) for kind, _, offset, vaddr, _, length, *_ in headers if kind == _LOAD]
        tags: dict[int, list[int]] = {}
        for kind, _, offset, _, _, length, *_ in headers:
            if kind == _DYNAMIC:
                for at in range(offset, offset + length, _TAG.size):
                    tag, value = _TAG.unpack_from(self.image, at)
                    if tag == 0:
                        break
                    tags.setdefault(tag, []).append(value)
        if not tags:
            raise NotReadable(
                "the file has no dynamic segment: a program linked statically, or a file of debug symbols"
            )
        return tags

    @cached_property
    def _symbols(self) -> int:
        return self._at(_SYMBOLS)

    def _at(self, tag: int) -> int:
        """Where in the file that lies to which a tag points; 0 where the tag is not there."""
        address = self._tags.get(tag, [0])[0]
        for vaddr, length, offset in self._loads:
            if vaddr <= address < vaddr + length:
                return address - vaddr + offset
        return 0

    def _names(self, tag: int) -> Iterator[str]:
        return (self._string(start) for start in self._tags.get(tag, ()))

    def _string(self, start: int) -> str:
        start += self._at(_STRINGS)
        end = self.image.find(b"\0", start)
        if not 0 <= start <= end:
            raise NotReadable("the file is damaged: a name lies outside of it")
        return self.image[start:end].decode("utf-8", errors="replace")

    def _count(self) -> int:
        """How many dynamic symbols there are: only sections and the old hash table say so outright."""
        (table,), (size, count) = (
            struct.unpack_from("<Q", self.image, 0x28),
            struct.unpack_from("<HH", self.image, 0x3A),
        )
        for index in range(count if table and table + count * size <= len(self.image) else 0):
            _, kind, _, _, offset, length, *_ = _SECTION.unpack_from(self.image, table + index * size)
            if kind == _DYNSYM and offset == self._symbols:
                return min(int(length) // _SYMBOL.size, _MOST)
        if old := self._at(_HASH):
            return min(int(struct.unpack_from("<I", self.image, old + 4)[0]), _MOST)
        if new := self._at(_GNU_HASH):  # what is undefined stands before what is hashed
            return min(int(struct.unpack_from("<I", self.image, new + 4)[0]), _MOST)
        return 0

    def _look_up(self, table: int, name: bytes) -> bool:
        buckets, first, words, shift = struct.unpack_from("<IIII", self.image, table)
        if not buckets or not words:
            return False
        value = 5381
        for letter in name:
            value = (value * 33 + letter) & 0xFFFFFFFF
        (word,) = struct.unpack_from("<Q", self.image, table + 16 + 8 * (value // 64 % words))
        if not (word >> value % 64 & 1 and word >> (value >> shift) % 64 & 1):
            return False
        start = table + 16 + 8 * words
        (number,) = struct.unpack_from("<I", self.image, start + 4 * (value % buckets))
        chain = start + 4 * buckets
        while first <= number < _MOST:
            (link,) = struct.unpack_from("<I", self.image, chain + 4 * (number - first))
            if link | 1 == value | 1 and self._is(number, name):
                return True
            if link & 1:
                return False
            number += 1
        return False

    def _is(self, number: int, name: bytes) -> bool:
        start, _, _, home, _, _ = _SYMBOL.unpack_from(self.image, self._symbols + number * _SYMBOL.size)
        start += self._at(_STRINGS)
        return bool(home) and self.image[start : start + len(name) + 1] == name + b"\0"

    @cached_property
    def _defined(self) -> frozenset[str]:
        found = []
        for number in range(1, self._count()):
            name, info, _, home, _, _ = _SYMBOL.unpack_from(self.image, self._symbols + number * _SYMBOL.size)
            if home and name and info >> 4:
                found.append(self._string(name))
        return frozenset(found)

    def _lazy(self) -> frozenset[int]:
        """Symbols that only calls go to, of a library that does not ask to have them bound at once."""
        flags, more = self._tags.get(_FLAGS, [0])[0], self._tags.get(_FLAGS_1, [0])[0]
        if _BIND_NOW in self._tags or flags & 8 or more & 1:
            return frozenset()
        start, size = self._at(_PLT), self._tags.get(_PLT_SIZE, [0])[0]
        if not start or start + size > len(self.image):
            return frozenset()
        return frozenset(
            _RELOCATION.unpack_from(self.image, at)[1] >> 32 for at in range(start, start + size, _RELOCATION.size)
        )

    def _sources(self) -> dict[int, str]:
        """Version number of a symbol -> library that it is expected from."""
        at, sources = self._at(_VERNEED), {}
        for _ in range(min(self._tags.get(_VERNEED_COUNT, [0])[0], 10_000)):
            _, count, file, first, following = struct.unpack_from("<HHIII", self.image, at)
            entry = at + first
            for _ in range(count):
                _, _, number, _, step = struct.unpack_from("<IHHII", self.image, entry)
                sources[number & 0x7FFF] = self._string(file)
                entry += step
            at += following
        return sources if self._at(_VERNEED) else {}
