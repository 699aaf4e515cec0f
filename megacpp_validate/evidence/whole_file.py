"""A file written aside and renamed, so that there is a whole one or none. Standard library only, as `receipt`."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8, whatever dies half way; folders on the way are made.

    Raises:
        OSError: the place cannot be written.
    """
    content = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # a name without its contents is what a power cut leaves
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
