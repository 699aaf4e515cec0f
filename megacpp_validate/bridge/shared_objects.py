"""Headers of shared libraries, read without loading any of them.

The loader maps a library and reads what its header promises: of one that a full disk or a broken copy cut short, that
lies beyond the end of the file, and the process dies of SIGBUS. No exception tells of it, so it is looked for before.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_MACHINES: Final = {3: "i386", 21: "ppc64", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}  # elf.h, e_machine
_LIBRARY: Final = re.compile(
    r"\.so(?:\.\d+)*$"
)  # not one with debug symbols alone (.so.debug): it is cut short by intent
_LOADED: Final = 1  # elf.h, PT_LOAD
_BESIDE: Final = ("", "lib", "wheel_lib")  # folders of a package that its libraries lie in


class Header(NamedTuple):
    """What an ELF header says.

    Attributes:
        machine: that it was built for, as `uname -m` calls it; "machine N" for one that is not known here.
        bits: 32 or 64.
        needs: bytes of the file that the loader maps.
    """

    machine: str
    bits: int
    needs: int


def read_header(file: Path) -> Header | None:
    """The header of a shared library; None where the file is none, or cannot be read."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
            if len(start) < 64 or start[:4] != b"\x7fELF":
                return None
            wide, order = start[4] == 2, ">" if start[5] == 2 else "<"
            machine = struct.unpack_from(f"{order}H", start, 18)[0]
            place = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", start, 32 if wide else 28)[0]
            size, number = struct.unpack_from(f"{order}HH", start, 54 if wide else 42)
            opened.seek(place)
            table = opened.read(size * number)
    except (OSError, OverflowError, ValueError, struct.error):
        return None
    rows = (table[at : at + size] for at in range(0, len(table), size or 1))
    needs = max((_end_of(row, wide, order) for row in rows if len(row) == size), default=0)
    return Header(_MACHINES.get(machine, f"machine {machine}"), 64 if wide else 32, needs)


def _end_of(row: bytes, wide: bool, order: str) -> int:
    """Where in the file a segment ends, if it is one that the loader maps."""
    if len(row) < (56 if wide else 32) or struct.unpack_from(f"{order}I", row)[0] != _LOADED:
        return 0
    if wide:
        offset, size = struct.unpack_from(f"{order}Q", row, 8)[0], struct.unpack_from(f"{order}Q", row, 32)[0]
    else:
        offset, size = struct.unpack_from(f"{order}I", row, 4)[0], struct.unpack_from(f"{order}I", row, 16)[0]
    return int(offset + size)


def find_cut_short(root: str) -> str:
    """What the loader would say of the first library beside a package that is cut short; empty where none is.

    Args:
        root: name of the top-level package.
    """
    for file in _libraries_beside(root):
        with suppress(OSError):
            header, size = read_header(file), file.stat().st_size
            if header is not None and header.needs > size:
                return f"{file}: file too short: {size} bytes of the {header.needs} that its header tells of"
    return ""


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
