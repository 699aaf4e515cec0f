"""A working copy: a sealed cache where libraries may write.

Libraries write where they only read: a lock beside each kernel (FlashAttention 4, TorchInductor), and what was missing.
So a sealed cache is copied to a folder of its user before anything starts, and the variables name that one. Copied, not
linked: through a hard link a library that writes in place would change what is sealed, and an image and a volume are
two file systems anyway. Where the file system shares blocks between copies (btrfs, xfs), the kernel does that here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from ..evidence.whole_file import write_whole
from .layout import LIBRARIES, OPENED, arch_folder
from .manifest import FileSeen, Manifest, manifest_text
from .seal import say_changed

_GROUP: Final = "__grp__"  # Triton's list of the files of one kernel, by absolute path (3.7.1, runtime/cache.py)
_CHILDREN: Final = "child_paths"
_COPIERS: Final = 4
_OPEN_FILE_MODE: Final = 0o644


def open_working(sealed: Path, manifest: Manifest, work: Path) -> Path:
    """Copy ROOT/ARCH to WORK/ARCH, every file of the manifest and nothing else.

    Args:
        sealed: ROOT/ARCH; it is read alone. Check it first (`seal.check_sealed`).
        manifest: of it.
        work: another root; WORK/ARCH must not be there.

    Returns:
        WORK/ARCH.

    Raises:
        FileExistsError: WORK/ARCH is there.
        OSError: it cannot be written, or the disk is full: what was written is removed then.
    """
    folder = arch_folder(work, manifest.architecture)
    folder.mkdir(parents=True)
    try:
        copy_files(sealed, folder, manifest.files)
        for name in LIBRARIES:
            (folder / name).mkdir(exist_ok=True)
        relocate(folder, manifest)
        write_whole(folder / OPENED, manifest_text(manifest))  # a prewarm that goes on here knows what is there
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def copy_files(source: Path, target: Path, files: Iterable[FileSeen]) -> None:
    """Copy files of a manifest from folder to folder, with their times.

    Raises:
        CacheDamaged: one is gone, or is shorter: something wrote there since it was checked.
        OSError: it cannot be written.
    """
    rows = tuple(files)
    for parent in sorted({(target / file.path).parent for file in rows}):
        parent.mkdir(parents=True, exist_ok=True)

    def copy(file: FileSeen) -> None:
        place = target / file.path
        try:
            done = _copy_bytes(source / file.path, place, file.bytes)
        except FileNotFoundError as fault:
            raise say_changed(source, f"{file.path} is gone now") from fault
        if done != file.bytes:
            raise say_changed(source, f"{file.path} has another size now")
        place.chmod(_OPEN_FILE_MODE)
        os.utime(place, ns=(file.mtime_ns, file.mtime_ns))

    with ThreadPoolExecutor(_COPIERS) as pool:
        for _ in pool.map(copy, rows):
            pass


def _copy_bytes(source: Path, target: Path, size: int) -> int:
    """In the kernel where it can, which shares blocks where the file system can; returns how much there was."""
    with source.open("rb") as reader, target.open("xb") as writer:
        left = size
        try:
            while left and (done := os.copy_file_range(reader.fileno(), writer.fileno(), left)):
                left -= done
        except OSError:
            if left != size:
                raise
            shutil.copyfileobj(reader, writer, 2**20)
            return writer.tell()
    return size - left


def relocate(folder: Path, manifest: Manifest) -> int:
    """Let Triton's groups of files name the folder that they lie in now; returns how many were changed.

    Triton looks a group up by the absolute paths that stand in it, and passes over a file that is not at its path.

    Args:
        folder: ROOT/ARCH as it is now.
        manifest: says where the caches were made.

    Raises:
        OSError: it cannot be written.
    """
    if str(folder) == manifest.folder:
        return 0
    changed = 0
    for file in manifest.files:
        if _is_group(file):
            place = folder / file.path
            text = move_group(place.read_text(encoding="utf-8"), manifest.folder, str(folder))
            write_whole(place, text)
            os.utime(place, ns=(file.mtime_ns, file.mtime_ns))
            changed += 1
    return changed


def is_at_home(folder: Path, manifest: Manifest) -> bool:
    """Whether the libraries find everything in this very folder, without a working copy."""
    return str(folder) == manifest.folder or not any(_is_group(file) for file in manifest.files)


def _is_group(file: FileSeen) -> bool:
    return file.names_root and file.path.rpartition("/")[2].startswith(_GROUP)


def move_group(text: str, old: str, new: str) -> str:
    """A group of Triton's with the paths below one folder put below another; other paths stay.

    Raises:
        OSError: it is no group. (A kind of `OSError`, as a damaged file is.)
    """
    try:
        data: dict[str, Any] = json.loads(text)
        children = {name: _move(str(path), old, new) for name, path in data[_CHILDREN].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as fault:
        raise OSError(f"a group of Triton's cache cannot be read: {fault}") from fault
    return json.dumps({**data, _CHILDREN: children})


def _move(path: str, old: str, new: str) -> str:
    prefix = old.rstrip("/") + "/"
    return f"{new.rstrip('/')}/{path.removeprefix(prefix)}" if path.startswith(prefix) else path
