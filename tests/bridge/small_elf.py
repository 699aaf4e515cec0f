"""A shared library that is only a header and one segment."""

from __future__ import annotations

import struct


def elf(*, machine: int = 62, loaded: int, size: int | None = None, offset: int = 0) -> bytes:
    """One that the loader would map `loaded` bytes of; the file has `size` bytes, all that is promised without one."""
    header = struct.pack(
        "<4sBBBB8xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, 3, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, offset, 0, 0, loaded, loaded, 4096)
    whole = (header + segment).ljust(loaded, b"\0")
    return whole if size is None else whole[:size]
