"""Shared libraries as the loader sees them: what lies in one, which are mapped, and whether a compiled file fits.

64-bit little-endian ELF with its section headers, which is what every vendor ships for the targets. Source: the ELF
specification.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ..evidence.doctor_look import Extension, Wanted
from .fingerprint import read_mapped

# Libraries of which a second file in one process is a finding.
_CUDA: Final = re.compile(r"lib(?:cudart|cublas|cublasLt|cudnn\w*|nccl|nvrtc|transformer_engine)\.so[.\d]*")
_RUNTIMES: Final = ("libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13")
_LIMIT_S: Final = 20.0

_SECTION: Final = struct.Struct("<IIQQQQIIQQ")  # name, kind, flags, address, offset, size, link, info, align, entry
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_TAG: Final = struct.Struct("<qQ")
_RELOCATION: Final = struct.Struct("<QQq")
_RELA, _DYNAMIC, _DYNSYM, _VERNEED, _VERSYM = 4, 6, 11, 0x6FFFFFFE, 0x6FFFFFFF  # kinds of section
_NEEDED, _SONAME, _RPATH, _PLT, _BIND_NOW, _RUNPATH, _FLAGS, _FLAGS_1 = 1, 14, 15, 23, 24, 29, 30, 0x6FFFFFFB
_PYTHON_TAG: Final = re.compile(r"\.((?:cpython|pypy|cp)-?\d[\w-]*|abi3)\.so$")
_MOST_SYMBOLS: Final = 12  # of one file; more say nothing new
_MOST_FILES: Final = 60


class NotReadable(ValueError):
    """A file that is no shared library, or a damaged one."""


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


@dataclass(frozen=True, eq=False)
class Elf:
    """One shared library.

    Attributes:
        soname: what others know it by; empty where it does not say.
        needed: libraries that are loaded with it.
        search: folders that it wants its libraries looked for in.
        wants: symbols that must be found elsewhere, without the weak ones, which may stay undefined.
        defined: symbols that others find in it, encoded.
    """

    soname: str
    needed: tuple[str, ...]
    search: tuple[Path, ...]
    wants: tuple[Symbol, ...]
    defined: frozenset[bytes]

    def defines(self, name: str) -> bool:
        """Whether others find this symbol in it."""
        return name.encode() in self.defined


def read_elf(path: Path) -> Elf:
    """Read one library.

    Raises:
        NotReadable: the file is not what it should be.
        OSError: it cannot be opened.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            return _read(image, str(path.parent))
    except (ValueError, struct.error, IndexError, OverflowError) as fault:
        raise NotReadable(f"it is damaged, or no shared library: {fault}") from fault


def _read(image: mmap.mmap, origin: str) -> Elf:
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,), (count,) = struct.unpack_from("<Q", image, 0x28), struct.unpack_from("<H", image, 0x3C)
    sections = [_SECTION.unpack_from(image, table + index * _SECTION.size) for index in range(count)]
    by_kind = {section[1]: section for section in reversed(sections)}
    if _DYNAMIC not in by_kind or _DYNSYM not in by_kind:
        raise ValueError("it has no dynamic symbols, as a program that is linked statically")

    def read(section: tuple[Any, ...]) -> bytes:
        start, size = section[4:6]
        if start + size > len(image):
            raise ValueError("it is cut short")
        return image[start : start + size]

    names = read(sections[by_kind[_DYNSYM][6]])

    def text(start: int) -> bytes:
        return names[start : names.index(b"\0", start)]

    tags: dict[int, list[int]] = {}
    for tag, value in _TAG.iter_unpack(read(by_kind[_DYNAMIC])):
        tags.setdefault(tag, []).append(value)
    search = [text(start).decode(errors="replace") for start in (*tags.get(_RUNPATH, ()), *tags.get(_RPATH, ()))][:1]
    entries = (entry.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for entry in ":".join(search).split(":"))
    at_once = _BIND_NOW in tags or tags.get(_FLAGS, [0])[0] & 8 or tags.get(_FLAGS_1, [0])[0] & 1
    calls = [] if at_once else [one for one in sections if one[1] == _RELA and one[3] in tags.get(_PLT, ())]
    lazy = {row[1] >> 32 for section in calls for row in _RELOCATION.iter_unpack(read(section))}
    versions = read(by_kind[_VERSYM]) if _VERSYM in by_kind else b""
    sources = _read_sources(read(by_kind[_VERNEED]), by_kind[_VERNEED][7]) if versions and _VERNEED in by_kind else {}
    wants, defined = [], set()
    for number, (start, info, _, home, _, _) in enumerate(_SYMBOL.iter_unpack(read(by_kind[_DYNSYM]))):
        if not start or not info >> 4:
            continue
        if home:
            defined.add(text(start))
        elif info >> 4 == 1:
            version = struct.unpack_from("<H", versions, 2 * number)[0] & 0x7FFF if versions else 0
            source = text(sources[version]).decode(errors="replace") if version in sources else ""
            wants.append(Symbol(text(start).decode(errors="replace"), source, number in lazy))
    return Elf(
        soname="".join(text(start).decode(errors="replace") for start in tags.get(_SONAME, ())),
        needed=tuple(text(start).decode(errors="replace") for start in tags.get(_NEEDED, ())),
        search=tuple(Path(entry) for entry in entries if entry),
        wants=tuple(wants),
        defined=frozenset(defined),
    )


def _read_sources(data: bytes, count: int) -> dict[int, int]:
    """Version number of a symbol -> where the name of the library stands that it is expected from."""
    at, sources = 0, {}
    for _ in range(count):
        _, entries, file, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(entries):
            _, _, number, _, step = struct.unpack_from("<IHHII", data, entry)
            sources[number & 0x7FFF] = file
            entry += step
        at += following
    return sources


# --- what is loaded, and what the loader finds ------------------------------------------------------------------------


def group_cuda(files: Iterable[Path]) -> dict[str, tuple[str, ...]]:
    """The CUDA libraries among some files, by their name without version: "libcudnn" -> its files."""
    groups: dict[str, tuple[str, ...]] = {}
    for file in sorted(set(files)):
        if _CUDA.fullmatch(file.name):
            name = file.name.partition(".so")[0]
            groups[name] = (*groups.get(name, ()), str(file))
    return dict(sorted(groups.items()))


def find_by_name(soname: str, first: Iterable[Path] = ()) -> tuple[Path, ...]:
    """The files that the loader knows under a name, in the order in which it looks; the same file once."""
    folders = [*first, *(Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)]
    places = [*(folder / soname for folder in folders), *map(Path, _read_loader_cache().get(soname, ()))]
    found: dict[str, Path] = {}
    for place in places:
        with suppress(OSError):
            if place.is_file():
                found.setdefault(os.path.realpath(place), place)
    return tuple(found.values())


@cache
def _read_loader_cache() -> dict[str, list[str]]:
    """The cache of the loader: name -> files; empty where it cannot be read."""
    words, variables = ("ldconfig", "-p"), {"PATH": f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin"}
    found: dict[str, list[str]] = {}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        for name, file in re.findall(r"^\s*(\S+) \(.*?\) => (\S+)$", done.stdout, re.MULTILINE):
            found.setdefault(name, []).append(file)
    return found


def open_runtimes() -> dict[str, str]:
    """What `dlopen` gives for each CUDA runtime: the question that cuDNN's frontend asks. It maps what it finds."""
    found = {}
    for name in _RUNTIMES:
        before = set(read_mapped())
        with suppress(OSError):
            ctypes.CDLL(name)
            after = [file for file in read_mapped() if re.fullmatch(rf"{re.escape(name)}[.\d]*", file.name)]
            found[name] = str(next((file for file in after if file not in before), next(iter(after), name)))
    return found


def read_driver_cuda() -> str:
    """The newest CUDA release that the driver runs, such as "13.0"; empty where there is no driver."""
    with suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return ""


# --- a compiled file against what is there ----------------------------------------------------------------------------


def find_compiled(folders: Iterable[Path]) -> tuple[Path, ...]:
    """The compiled files below some folders; a package with very many is one of which a part says enough."""
    found = [file for folder in folders if folder.is_dir() for file in sorted(folder.rglob("*.so*"))]
    return tuple(file for file in found if re.search(r"\.so[.\d]*$", file.name) and file.is_file())[:_MOST_FILES]


def look_at(file: Path, mapped: Sequence[Path], beside: Sequence[Path] = ()) -> Extension:
    """One compiled file.

    Args:
        file: which.
        mapped: every library of this process after the import, and the interpreter itself.
        beside: other compiled files of its package, which are loaded before it where all is well.
    """
    tag = found[1] if (found := _PYTHON_TAG.search(file.name)) else ""
    loaded = any(file.name == other.name and file.samefile(other) for other in mapped if other.exists())
    try:
        elf = read_elf(file)
    except (NotReadable, OSError) as fault:
        return Extension(file=str(file), tag=tag, loaded=loaded, problem=str(fault))
    near, not_found = _find_libraries(elf, mapped, beside)
    # Where a library is missing, its symbols are, too.
    lost = [] if not_found else [symbol for symbol in elf.wants if not any(one.defines(symbol.name) for one in near)]
    lost.sort(key=lambda symbol: (symbol.lazy, symbol.name))
    return Extension(
        file=str(file), tag=tag, loaded=loaded, needed=elf.needed, not_found=not_found,
        wanted=tuple(Wanted(one.name, _read_name(one.name), lazy=one.lazy) for one in lost[:_MOST_SYMBOLS]),
    )  # fmt: skip


def _find_libraries(elf: Elf, mapped: Sequence[Path], beside: Sequence[Path]) -> tuple[list[Elf], tuple[str, ...]]:
    """Where its symbols may come from: all that is mapped, and what would be loaded with it. And what is not there."""
    neighbours = [found for place in beside if (found := _open(place))]
    near = [*neighbours, *(found for place in mapped if (found := _open(place)))]
    known = {one.soname for one in near} | {place.name for place in (*mapped, *beside)}
    not_found: set[str] = set()
    waiting = [(name, one) for one in neighbours for name in one.needed] + [(name, elf) for name in elf.needed]
    while waiting:
        name, asks = waiting.pop()
        if name in known:
            continue
        known.add(name)
        if found := next(filter(None, map(_open, find_by_name(name, asks.search))), None):
            near.append(found)
            waiting += [(other, found) for other in found.needed]
        elif asks not in neighbours:  # what a neighbour lacks is reported of the neighbour
            not_found.add(name)
    return near, tuple(sorted(not_found))


@cache
def _open(place: Path) -> Elf | None:
    """A library that may be damaged: then it is a row of its own."""
    try:
        return read_elf(place)
    except (NotReadable, OSError):
        return None


def _read_name(symbol: str) -> str:
    """A C++ name without its encoding, where torch is there to decode it."""
    decode = getattr(getattr(sys.modules.get("torch"), "_C", None), "_demangle", None)
    return str(decode(symbol)) if decode else symbol
