"""The files of a package against the record that its installer left, so that a version is not believed unseen.

One release unpacked over another, or a file that was patched in place, keeps the metadata of what was there before; and
metadata is where a version is read from. Source of the format: packaging.python.org, "Recording installed projects".
"""

from __future__ import annotations

import base64
import csv
import json
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Final

from ..evidence.doctor_look import Record

_MODE: Final = "sha256="


def compare_meanwhile(top: str, names: Sequence[str], folder: Path) -> Callable[[], Record]:
    """`compare_record` in a process of its own, while this one imports the package; what is returned waits for it.

    Twelve thousand files are half a second, and the import that goes on beside them needs none of it. To be called
    while this process has one thread: it forks.
    """
    ours, theirs = os.pipe()
    try:
        child = os.fork()
    except OSError:  # a limit of processes
        os.close(ours)
        os.close(theirs)
        return partial(compare_record, top, names, folder)
    if not child:
        try:
            os.close(ours)
            with os.fdopen(theirs, "w", encoding="utf-8") as out:
                json.dump(asdict(compare_record(top, names, folder)), out)
        finally:
            os._exit(0)
    os.close(theirs)

    def wait() -> Record:
        try:
            with os.fdopen(ours, encoding="utf-8") as answer:
                told = json.load(answer)
        except (OSError, ValueError):  # an import may close what it did not open, or end its process's children
            return compare_record(top, names, folder)
        finally:
            with suppress(OSError):
                os.waitpid(child, 0)
        return Record(told["compared"], tuple(told["changed"]), tuple(told["gone"]), told["elsewhere"])

    return wait


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
            # Not `found.files`: from Python 3.12 on it leaves out what is not there, which is what is looked for.
            rows = csv.reader((found.read_text("RECORD") or "").splitlines())
            files = [row for row in rows if len(row) >= 3 and row[1] and row[0].startswith(f"{top}/")]
            if files:
                return _compare(os.path.realpath(str(found.locate_file(""))), files, folder)
    return Record()


def _compare(home: str, files: Sequence[Sequence[str]], folder: Path) -> Record:
    if home != os.path.realpath(folder.parent):
        return Record(elsewhere=home)
    kept = {name: _is_as_recorded(f"{home}/{name}", hashed, size) for name, hashed, size, *_ in files}
    return Record(
        compared=len(kept),
        changed=tuple(name for name, same in kept.items() if same is False),
        gone=tuple(name for name, same in kept.items() if same is None),
    )


def _is_as_recorded(place: str, hashed: str, size: str) -> bool | None:
    """None where it is not there."""
    try:
        kind = os.stat(place)  # noqa: PTH116 - of twelve thousand files; a Path for each takes longer than the kernel
        if size and kind.st_size != int(size):
            return False
        if not place.endswith(".py") or not hashed.startswith(_MODE):
            return True if stat.S_ISREG(kind.st_mode) else None
        digest = base64.urlsafe_b64encode(sha256(Path(place).read_bytes()).digest()).decode().rstrip("=")
    except OSError:
        return None
    return digest == hashed[len(_MODE) :]
