"""A shared library as the loader sees it: what it needs, what it wants, what it defines.

64-bit little-endian ELF, which is what every vendor ships for the targets. Only the dynamic segment is used where that
is enough: it is there in stripped files too. Source: the ELF specification, and the GNU hash table as glibc reads it.

A compiled file of a package against what is there: its libraries, its symbols, and the torch it was built for.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import Final

from ..evidence.doctor_look import Extension, Headers, Wanted
from .doctor_visible import compare_headers, find_by_name

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


_TAG_of_doctor_abi: Final = re.compile(r"\.((?:cpython|pypy|cp)-?\d[\w-]*|abi3)\.so$")
_MOST_TOLD: Final = 12  # symbols of one file; more say nothing new
_MOST_FILES: Final = 60
_OF_TORCH: Final = re.compile(r"lib(torch\w*|c10\w*)\.so")
_OWNERS: Final = (
    # The first pattern that a symbol starts with says whose it is, and which libraries have it.
    (r"_Z(?:T[VISTv]|GV)?N?[KVrO]*(?:3c10|2at|5torch|6caffe2)|THP|_ZN[KVrO]*8pybind11.*(?:2at|5torch)", "torch",
     r"lib(torch\w*|c10\w*)\.so"),
    (r"aoti_torch|torch_", "torch", r"lib(torch\w*|c10\w*)\.so"),
    (r"cublasLt", "cuBLAS", r"libcublasLt\.so"),
    (r"cublas", "cuBLAS", r"libcublas\.so"),
    (r"cudnn", "cuDNN", r"libcudnn\w*\.so"),
    (r"nccl", "NCCL", r"libnccl\.so"),
    (r"nvrtc", "NVRTC", r"libnvrtc\.so"),
    (r"nvte_|_ZN[KVrO]*18transformer_engine", "Transformer Engine's core library", r"libtransformer_engine\.so"),
    (r"TVMFFI|_ZN[KVrO]*3tvm", "tvm-ffi", r"libtvm_ffi\.so"),
    (r"cuda|__cuda", "CUDA runtime", r"libcudart\.so"),
    (r"cu[A-Z]", "CUDA driver", r"libcuda\.so"),
    (r"_?Py[A-Z_]", "Python", r"libpython|python"),
)  # fmt: skip


def find_compiled(folders: Iterable[Path]) -> tuple[Path, ...]:
    """The compiled files below some folders; a package with very many is one of which a part says enough."""
    found = [file for folder in folders if folder.is_dir() for file in sorted(folder.rglob("*.so*"))]
    return tuple(file for file in found if re.search(r"\.so[.\d]*$", file.name) and file.is_file())[:_MOST_FILES]


def look_at(file: Path, mapped: Sequence[Path], include: Path | None, beside: Sequence[Path] = ()) -> Extension:
    """One compiled file.

    Args:
        file: which.
        mapped: every library of this process after the import, and the interpreter itself.
        include: headers of the torch that is there; None where there are none.
        beside: other compiled files of its package, which are loaded before it where all is well.
    """
    tag = found[1] if (found := _TAG_of_doctor_abi.search(file.name)) else ""
    loaded = any(file.name == other.name and file.samefile(other) for other in mapped if other.exists())
    try:
        with Elf(file) as elf:
            near, not_found = _find_libraries(elf, mapped, beside)
            lost = [symbol for symbol in elf.wants() if not any(_opened(place).defines(symbol.name) for place in near)]
            of_torch = any(map(_OF_TORCH.match, elf.needed))
            headers = compare_headers(elf.image, include) if include is not None and of_torch else Headers()
            return Extension(
                file=str(file),
                tag=tag,
                loaded=loaded,
                needed=elf.needed,
                not_found=not_found,
                wanted=_tell(lost, not_found),
                headers=headers,
            )
    except (NotReadable, OSError) as fault:
        return Extension(file=str(file), tag=tag, loaded=loaded, problem=str(fault))


def _find_libraries(
    elf: Elf, mapped: Sequence[Path], beside: Sequence[Path]
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Where its symbols may come from: all that is mapped, and what would be loaded with it. And what is not there."""
    near = {str(place): place for place in (*mapped, *beside) if _opened(place) is not None}
    names = {_opened(place).soname or place.name for place in near.values()} | {place.name for place in near.values()}
    own = [(name, elf.search) for name in elf.needed]
    theirs = [(name, _opened(place).search) for place in beside if str(place) in near for name in _opened(place).needed]
    waiting, not_found = [*theirs, *own], dict[str, None]()  # its own are taken first, from the end
    while waiting:
        name, search = waiting.pop()
        if name in names or name in not_found:
            continue
        places = [place for place in find_by_name(name, search) if _opened(place) is not None]
        if not places:
            not_found.setdefault(name)
            continue
        names.add(name)
        near[str(places[0])] = places[0]
        waiting += [(other, _opened(places[0]).search) for other in _opened(places[0]).needed]
    others = {name for name, _ in theirs} - {name for name, _ in own}  # a neighbour's trouble is told of the neighbour
    return tuple(near.values()), tuple(sorted(set(not_found) - others))


@cache
def _opened(place: Path) -> Elf:
    """A library that stays open; an empty answer for everything where it cannot be read."""
    try:
        elf = Elf(place)
        _ = elf.soname  # reads the dynamic segment
        elf.defines("")
    except Exception:  # a damaged neighbour is its own row
        return None  # type: ignore[return-value]
    return elf


def _tell(lost: Sequence[Symbol], not_found: Sequence[str]) -> tuple[Wanted, ...]:
    """What is to be told of symbols that nothing defines; those of a library that is missing go without saying."""
    told = []
    for symbol in lost:
        owner, homes = find_owner(symbol.name)
        if symbol.source in not_found or (homes and any(re.match(homes, name) for name in not_found)):
            continue
        told.append(Wanted(symbol.name, read_name(symbol.name), owner, symbol.lazy))
    told.sort(key=lambda wanted: (wanted.lazy, not wanted.owner, wanted.symbol))
    return tuple(told[:_MOST_TOLD])


def find_owner(symbol: str) -> tuple[str, str]:
    """Whose a symbol is, and a pattern of the libraries that would have it; empty where its name does not say."""
    for start, owner, homes in _OWNERS:
        if re.match(start, symbol):
            return owner, homes
    return "", ""


def read_name(symbol: str) -> str:
    """A C++ name without its encoding: scopes and name, no parameters. Source: Itanium C++ ABI, 5.1."""
    match = re.match(r"_Z(?:T[VISTv])?N?[KVrO]*", symbol)
    if match is None:
        return symbol
    parts, at = [], match.end()
    while length := re.match(r"\d+", symbol[at:]):
        start = at + length.end()
        at = start + int(length[0])
        parts.append(symbol[start:at])
    if parts and re.match(r"C[1-3]", symbol[at:]):
        parts.append(parts[-1])
    if not parts:
        return symbol
    if match[0].startswith("_ZN") and symbol[at : at + 1] not in ("E", "C", "D", "I"):
        return f"{'::'.join(parts)}::operator..."
    name = "::".join(parts)
    if re.search(r"(?<!\d)Ss(?:$|[A-Z])|RKSs", symbol[at:]):
        name += " (with the C++ strings of before 2015)"
    return f"{name}()" if not symbol.startswith("_ZT") else name


def torch_headers() -> Path | None:
    """The headers beside the torch that is loaded, or that would be."""
    from importlib.util import find_spec

    try:
        loaded = sys.modules.get("torch")
        file = getattr(loaded, "__file__", None) or getattr(find_spec("torch"), "origin", None)
    except Exception:
        return None
    include = Path(file).parent / "include" if file else None
    return include if include is not None and include.is_dir() else None
