"""Changed names inside compiled libraries, as an install of mixed builds has them."""

from __future__ import annotations

import re
from pathlib import Path


def rename(library: Path, pattern: str, end: str) -> tuple[str, str]:
    """Change the end of the first string that matches; the file is replaced, never written through a link.

    Returns:
        The old and the new name.
    """
    image = library.read_bytes()
    found = re.search(rb"(?<=\0)(?:" + pattern.encode() + rb")(?=\0)", image)
    assert found is not None, f"{library.name} has no string {pattern}"
    old = found[0].decode()
    new = old[: -len(end)] + end
    library.unlink()
    library.write_bytes(image[: found.start()] + new.encode() + image[found.end() :])
    return old, new
