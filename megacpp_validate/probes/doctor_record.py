"""The files of a package against the record that its installer left, so that a version is not believed unseen.

One release unpacked over another, or a file that was patched in place, keeps the metadata of what was there before; and
metadata is where a version is read from. Source of the format: packaging.python.org, "Recording installed projects".
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from ..evidence.doctor_look import Record


def compare_record(top: str, names: Sequence[str], folder: Path) -> Record:
    """Hold the files of a package against the record of the first distribution that lists any of them.

    An editable install lists none, and then nothing is said. Sizes of all files are compared, contents of sources only.

    Args:
        top: top-level package.
        names: distributions that may have brought it.
        folder: that it was loaded from.
    """
    for name in names:
        with suppress(Exception):  # a damaged install raises what it likes, and is told of elsewhere
            found = metadata.distribution(name)
            files = [file for file in found.files or () if file.parts[0] == top and file.hash is not None]
            if files:
                return _compare(found, files, folder)
    return Record()


def _compare(found: metadata.Distribution, files: Sequence[metadata.PackagePath], folder: Path) -> Record:
    home = os.path.realpath(str(found.locate_file("")))
    if home != os.path.realpath(folder.parent):
        return Record(elsewhere=home)
    kept = {str(file): _is_as_recorded(file) for file in files}
    return Record(
        compared=len(kept),
        changed=tuple(name for name, same in kept.items() if same is False),
        gone=tuple(name for name, same in kept.items() if same is None),
    )


def _is_as_recorded(file: metadata.PackagePath) -> bool | None:
    """None where it is not there."""
    place = Path(str(file.locate()))
    try:
        if file.size is not None and place.stat().st_size != file.size:
            return False
        if place.suffix != ".py" or file.hash is None or file.hash.mode != "sha256":
            return True if place.is_file() else None
        digest = base64.urlsafe_b64encode(sha256(place.read_bytes()).digest()).decode().rstrip("=")
    except OSError:
        return None
    return digest == file.hash.value
