"""What is known of a failed import: what was raised, from what, and which parts of the library lie on the path.

These are facts, in words of one line and as a JSON object. What they mean (the likely cause, the next step) is decided
where the whole tool is: `megacpp-validate doctor` and the firewall tier have one table for it. Nothing here imports a
vendor library or raises.

A library that a full disk or a broken copy cut short is looked for before the import: the loader maps what its header
promises, what lies beyond the end of the file cannot be read, and the process dies of SIGBUS without any exception.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final, NamedTuple

# Of a longer text the start and the end are kept. Rules search it with patterns that take its length squared: 100 kB,
# as a compiler's log in an exception is, took a minute.
LONGEST: Final = 3000
_MANY: Final = 16  # exceptions that one was raised from, or is a group of

SOURCES: Final = "transformer-engine"
CORES: Final = ("transformer-engine-cu12", "transformer-engine-cu13")
EXTENSION: Final = "transformer-engine-torch"

_LIBRARY: Final = re.compile(r"\.so(?:\.\d+)*$")  # not one of debug symbols alone (.so.debug), cut short by intent
_LOADED: Final = 1  # elf.h, PT_LOAD
_BESIDE: Final = ("", "lib", "wheel_lib")  # folders of a package that its libraries lie in


# --- what was raised --------------------------------------------------------------------------------------------------


def text_of(fault: BaseException) -> str:
    """The text of an exception in one printable line of bounded length; never raises."""
    try:
        text = str(fault)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an odd exception may raise anything from its own __str__
        return "its text cannot be made"
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} [... {len(text) - LONGEST} characters ...] {text[-LONGEST // 2 :]}"
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    return line or "no text"


def describe_fault(fault: BaseException) -> str:
    """Class and text of an exception, and of the first two that it was raised from."""
    causes = "".join(f" (from {type(one).__name__}: {text_of(one)})" for one in raised_from(fault)[1:3])
    return f"{type(fault).__name__}: {text_of(fault)}{causes}"


def raised_from(fault: BaseException) -> tuple[BaseException, ...]:
    """The exception, what it was explicitly raised from, and the members of groups, outermost first."""
    found: list[BaseException] = []
    left = [fault]
    while left and len(found) < _MANY:
        one = left.pop(0)
        if any(one is other for other in found):
            continue
        found.append(one)
        members = getattr(one, "exceptions", ())  # of an exception group
        inner = [one.__cause__, *(members if isinstance(members, tuple) else ())]
        left[:0] = [each for each in inner if isinstance(each, BaseException)]
    return tuple(found)


def _handled(fault: BaseException) -> tuple[BaseException, ...]:
    """What was being handled when an exception was raised: where that exception itself explains nothing."""
    found: list[BaseException] = []
    one = fault.__context__ if not fault.__suppress_context__ else None
    while one is not None and len(found) < _MANY and not any(one is other for other in found):
        found.append(one)
        one = one.__context__
    return tuple(found)


def place_in(fault: BaseException, package: str) -> str:
    """ " (at FILE:LINE)" of the innermost frame of a package in a traceback; empty where there is none."""
    frames = traceback.extract_tb(fault.__traceback__)
    inside = [frame for frame in frames if f"{os.sep}{package}{os.sep}" in frame.filename]
    return f" (at {inside[-1].filename}:{inside[-1].lineno})" if inside else ""


def read_failure(fault: BaseException) -> dict[str, Any]:
    """What was raised, as a JSON object.

    Returns:
        "raised": the exception, then what it was raised from; "handled": what was being handled meanwhile. Of each one
        its classes (its own first), text, and, where it has them, the module or attribute it names, the file it is
        about, the system's error number, and the line.
    """
    return {
        "raised": [_read_fault(one) for one in raised_from(fault)],
        "handled": [_read_fault(one) for one in _handled(fault)],
    }


def _read_fault(fault: BaseException) -> dict[str, Any]:
    owner = getattr(fault, "obj", None) if isinstance(fault, AttributeError) else None
    name = getattr(fault, "name", None)
    root = sys.modules.get(name.partition(".")[0]) if isinstance(name, str) else None
    file = getattr(fault, "path", None) if isinstance(fault, ImportError) else getattr(fault, "filename", None)
    return {
        "kinds": [kind.__name__ for kind in type(fault).__mro__ if issubclass(kind, BaseException)],
        "text": text_of(fault),
        "name": name if isinstance(name, str) else "",
        "file": str(file or getattr(owner, "__file__", None) or ""),
        "number": getattr(fault, "errno", None) or 0 if isinstance(fault, OSError) else 0,
        "line": getattr(fault, "lineno", None) or 0,
        "owner": str(getattr(owner, "__name__", type(owner).__name__)) if owner is not None else "",
        "root_loaded": root is not None,
        "root_file": "" if root is None or hasattr(root, "__path__") else str(getattr(root, "__file__", None) or ""),
    }


# --- what of Transformer Engine is on the path ------------------------------------------------------------------------


class Install(NamedTuple):
    """What of Transformer Engine lies on `sys.path`: Python sources, core library and torch extension.

    versions: distribution name -> version, as the first match on the path has it.
    copies: every folder on the path that holds a `transformer_engine` package, and every file that is a module of
        that name, in the order of the path.
    has_core, has_extension: whether the compiled halves were found beside a copy.
    unreadable: distributions whose metadata is there and cannot be read.
    has_record: whether the metadata of the sources lists their files; True where there is no metadata.
    in_the_way: what has the name of the package on the path, and is neither a folder nor a module.
    """

    versions: dict[str, str]
    copies: tuple[str, ...]
    has_core: bool
    has_extension: bool
    unreadable: tuple[str, ...] = ()
    has_record: bool = True
    in_the_way: tuple[str, ...] = ()

    def describe(self) -> str:
        """The install in one line."""
        parts = [f"{name} {version}" for name, version in self.versions.items()] or ["no distribution"]
        parts += [f"{name} (its metadata cannot be read)" for name in self.unreadable]
        where = ", ".join(self.copies) or "no folder of sys.path"
        return f"{', '.join(parts)}; sources in {where}"


def look_for_te() -> Install:
    """What of Transformer Engine lies on the path of this process. Imports nothing, never raises."""
    versions: dict[str, str] = {}
    unreadable: list[str] = []
    has_record = True
    for name in (SOURCES, *CORES, EXTENSION):
        try:
            version = metadata.version(name)
            has_record &= name != SOURCES or metadata.files(name) is not None
        except metadata.PackageNotFoundError:
            continue
        except Exception:  # bytes that are no text, no permission, whatever a damaged disk leaves
            unreadable.append(name)
            continue
        if isinstance(version, str):  # None where METADATA is gone, whatever the annotation says
            versions[name] = version
        else:
            unreadable.append(name)
    copies: list[str] = []
    in_the_way: list[str] = []
    libraries: set[str] = set()
    for entry in dict.fromkeys(sys.path):
        package = Path(entry or ".") / "transformer_engine"
        try:
            if not package.is_dir():
                copies += [str(file) for file in _modules_of(package) if file.is_file()]
                in_the_way += [str(package)] if os.path.lexists(package) else []
                continue
            copies.append(str(package))
            for folder in (package.parent, package, package / "wheel_lib"):
                libraries.update(file.name for file in folder.glob("*transformer_engine*.so*"))
        except (OSError, ValueError):
            continue
    return Install(
        versions,
        tuple(copies),
        any(name.startswith("libtransformer_engine") for name in libraries),
        any(name.startswith("transformer_engine_torch") for name in libraries),
        tuple(unreadable),
        has_record,
        tuple(in_the_way),
    )


def _modules_of(package: Path) -> list[Path]:
    """Files that Python would import in place of a package."""
    return [package.with_name(f"{package.name}{suffix}") for suffix in (*EXTENSION_SUFFIXES, ".py", ".pyc")]


# --- libraries that are cut short -------------------------------------------------------------------------------------


def find_cut_short(root: str) -> str:
    """What the loader would say of the first library beside a package that is cut short; empty where none is.

    Args:
        root: name of the top-level package.
    """
    for file in _libraries_beside(root):
        with suppress(OSError):
            needs, size = bytes_needed(file), file.stat().st_size
            if needs > size:
                return f"{file}: file too short: {size} bytes of the {needs} that its header tells of"
    return ""


def bytes_needed(file: Path) -> int:
    """Bytes of a shared library that the loader maps, by its ELF header; 0 where the file is none or cannot be read."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
            if len(start) < 64 or start[:4] != b"\x7fELF":
                return 0
            wide, order = start[4] == 2, ">" if start[5] == 2 else "<"
            place = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", start, 32 if wide else 28)[0]
            size, number = struct.unpack_from(f"{order}HH", start, 54 if wide else 42)
            opened.seek(place)
            table = opened.read(size * number)
    except (OSError, OverflowError, ValueError, struct.error):
        return 0
    rows = (table[at : at + size] for at in range(0, len(table), size or 1))
    return max((_end_of(row, wide, order) for row in rows if len(row) == size), default=0)


def _end_of(row: bytes, wide: bool, order: str) -> int:
    """Where in the file a segment ends, if it is one that the loader maps."""
    if len(row) < (56 if wide else 32) or struct.unpack_from(f"{order}I", row)[0] != _LOADED:
        return 0
    if wide:
        offset, size = struct.unpack_from(f"{order}Q", row, 8)[0], struct.unpack_from(f"{order}Q", row, 32)[0]
    else:
        offset, size = struct.unpack_from(f"{order}I", row, 4)[0], struct.unpack_from(f"{order}I", row, 16)[0]
    return int(offset + size)


def _libraries_beside(root: str) -> Iterator[Path]:
    """Shared libraries of the copy of a package that comes first on the path, and of the same name beside it."""
    for entry in sys.path:
        package = Path(entry or ".") / root
        with suppress(OSError):
            if not (package / "__init__.py").is_file():
                continue
            found = [file for folder in _BESIDE for file in (package / folder).glob("*.so*")]
            found += package.parent.glob(f"*{root}*.so*")
            yield from sorted(file for file in found if _LIBRARY.search(file.name))
            return
