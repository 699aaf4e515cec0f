"""Whether a folder is what it is taken for: the caches of one architecture and machine, and one that can be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .layout import MANIFEST, STATE, arch_folder
from .manifest import ManifestInvalid, read_manifest

_LEAST_FREE: Final = 2**20  # bytes; a kernel has 30 kB to 1 MB
_PLACE: Final = "place.json"  # from the first moment of a prewarm; the manifest comes last


class OtherArchitecture(RuntimeError):
    """A folder for caches of another architecture, or none of this layout."""


class CacheReadOnly(RuntimeError):
    """A folder for caches that cannot be written, or not be reached at all."""


class CannotLoad(RuntimeError):
    """A folder for caches from which no library can be loaded."""


class _Place(Frozen):
    architecture: str
    machine: str


def require_place(root: Path, architecture: str, machine: str) -> Path:
    """ROOT/ARCH, once it is clear that it is one, and of this architecture.

    Args:
        root: of all caches.
        architecture: such as "sm_90a".
        machine: kind of CPU, because host code is among what is cached; empty where that is compared later.

    Raises:
        OtherArchitecture: it is not.
        CacheReadOnly: nobody can look there.
    """
    try:
        is_folder_of_one = any((root / name).is_file() for name in (MANIFEST, f"{STATE}/{_PLACE}"))
        with suppress(FileNotFoundError, NotADirectoryError):
            (arch_folder(root, architecture) / MANIFEST).stat()
    except OSError as fault:
        raise CacheReadOnly(
            f"the JIT caches in {root} cannot be reached: {fault.strerror or fault}. Likely cause: a folder on the way "
            "belongs to another user, or the name is too long for its file system. Next step: give --root a folder "
            "that you can read and write."
        ) from fault
    if is_folder_of_one:
        raise OtherArchitecture(
            f"{root} is the cache of one architecture, and not the root of them. Likely cause: ROOT/ARCH was given. "
            f"Next step: give {root.parent}."
        )
    folder = arch_folder(root, architecture)
    for kind, found, wanted in _read_places(folder, architecture, machine):
        if found != wanted:
            raise OtherArchitecture(
                f"{folder} holds caches of the {kind} {found}, and {wanted} is asked for. Likely cause: a folder was "
                "copied under another name, or is shared by machines of two kinds. Its keys do not all hold the "
                f"architecture, so it would be taken and crash. Next step: give another --root, or remove {folder}."
            )
    return folder


def _read_places(folder: Path, architecture: str, machine: str) -> Iterator[tuple[str, str, str]]:
    """What a folder says of itself: kind, found, wanted."""
    with suppress(OSError, ValidationError):
        place = _Place.model_validate_json((folder / STATE / _PLACE).read_bytes())
        yield from _say(place.architecture, place.machine, architecture, machine)
    with suppress(ManifestInvalid):
        manifest, _ = read_manifest(folder)
        yield from _say(manifest.architecture, manifest.stack.machine, architecture, machine)


def _say(found: str, found_machine: str, wanted: str, machine: str) -> Iterator[tuple[str, str, str]]:
    yield "architecture", found, wanted
    if machine:
        yield "machine", found_machine, machine


def mark_place(folder: Path, machine: str) -> None:
    """Write down whose caches a folder holds, before the first of them is there. Raises `OSError`."""
    place = _Place(architecture=folder.name, machine=machine)
    write_whole(folder / STATE / _PLACE, place.model_dump_json() + "\n")


def require_writable(folder: Path) -> None:
    """Refuse a folder for caches that cannot be written.

    Raises:
        CacheReadOnly: it cannot be made or written.
        OSError: its disk is full.
    """
    try:
        try_to_write(folder)
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # full is another matter
        raise CacheReadOnly(
            f"the JIT caches in {folder} cannot be written: {fault.strerror or fault}. Likely cause: the folder "
            "belongs to another user, or lies on a file system that is mounted read-only, as the root of a container "
            "may be. Next step: give --root a folder that you can write; a sealed cache is used by a copy of it "
            "(`nox -s jit_cache -- open --root SEALED --work FOLDER`)."
        ) from fault


def try_to_write(folder: Path) -> None:
    """Write to a folder, which says more than its mode: a mount may be read-only, and root may write anything.

    Raises:
        OSError: it cannot be made or written.
    """
    probe = folder / f".writable.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    probe.write_bytes(b"")
    probe.unlink()


def require_loadable(folder: Path) -> None:
    """Refuse a folder on a file system that is mounted noexec: Triton and TorchInductor load libraries from theirs.

    Args:
        folder: is there.

    Raises:
        CannotLoad: it is on one.
    """
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):  # of Linux
        raise CannotLoad(
            f"no library can be loaded from {folder}: its file system is mounted noexec, and every task would fail. "
            "Likely cause: `--tmpfs /tmp` of `docker run`, which is noexec unless it says otherwise. Next step: "
            "`--tmpfs /tmp:exec`, or another folder (--root, --work, TMPDIR)."
        )


def require_space(folder: Path) -> None:
    """Refuse a disk that is full: FlashAttention 4 and others go on without a word when they cannot keep a kernel.

    Raises:
        OSError: there is not a MiB left.
    """
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _LEAST_FREE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
