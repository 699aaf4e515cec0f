"""Whether a folder can hold caches: of one architecture and machine, writable, loadable, with space."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from ..errors import EvidenceMissing, WrongArguments
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .layout import MANIFEST, STATE, arch_folder
from .manifest import read_manifest

_LEAST_FREE: Final = 2**20  # bytes; a kernel has 30 kB to 1 MB
_PLACE: Final = "place.json"  # from the first moment of a prewarm; the manifest comes last


class _Place(Frozen):
    architecture: str
    machine: str


def require_place(root: Path, architecture: str, machine: str = "") -> Path:
    """ROOT/ARCH, once it is clear that it is one, and of this architecture.

    Args:
        root: of all caches.
        architecture: such as "sm_90a".
        machine: kind of CPU, because host code is among what is cached; empty where that is compared later.

    Raises:
        WrongArguments: it is not, or nobody can look there.
    """
    folder = arch_folder(root, architecture)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            (folder / MANIFEST).stat()
        inside = any((root / name).is_file() for name in (MANIFEST, f"{STATE}/{_PLACE}"))
    except OSError as fault:
        raise WrongArguments(
            f"the JIT caches in {root} cannot be reached: {fault.strerror or fault}. Likely cause: a folder on the way "
            "belongs to another user, or the name is too long for its file system. Next step: give --root a folder "
            "that you can read and write."
        ) from fault
    if inside:
        raise WrongArguments(
            f"{root} is the cache of one architecture, and not the root of them. Likely cause: ROOT/ARCH was given. "
            f"Next step: give {root.parent}."
        )
    for place in _read_places(folder):
        for kind, found, wanted in (
            ("architecture", place.architecture, architecture), ("machine", place.machine, machine or place.machine)
        ):  # fmt: skip
            if found != wanted:
                raise WrongArguments(
                    f"{folder} holds caches of the {kind} {found}, and {wanted} is requested. Likely cause: a folder "
                    "was copied under another name, or machines of two kinds share it. Its keys do not all hold the "
                    f"architecture, so its kernels would crash. Next step: give another --root, or remove {folder}."
                )
    return folder


def _read_places(folder: Path) -> Iterator[_Place]:
    """What a folder says of itself."""
    with suppress(OSError, ValidationError):
        yield _Place.model_validate_json((folder / STATE / _PLACE).read_bytes())
    with suppress(EvidenceMissing):
        manifest, _ = read_manifest(folder)
        yield _Place(architecture=manifest.architecture, machine=manifest.stack.machine)


def mark_place(folder: Path, machine: str) -> None:
    """Write down whose caches a folder holds, before the first of them is there. Raises `OSError`."""
    place = _Place(architecture=folder.name, machine=machine)
    write_whole(folder / STATE / _PLACE, place.model_dump_json() + "\n")


def require_writable(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be made or written.

    Writing says more than its mode: a mount may be read-only, and root may write anything.

    Args:
        option: that names the folder.

    Raises:
        WrongArguments: it is one.
        OSError: its disk is full.
    """
    probe = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise WrongArguments(
            f"{folder} cannot be written: {fault.strerror or fault}. Likely cause: it is a file, belongs to another "
            "user, or lies on a file system that is mounted read-only, as the root of a container may be. Next step: "
            f"give {option} a folder that you can write; to use a sealed cache, copy it: "
            "`nox -s jit_cache -- open --root SEALED --work FOLDER`."
        ) from fault


def require_usable(folder: Path) -> None:
    """Refuse a folder that is mounted noexec, or whose disk is full.

    Triton and TorchInductor load libraries from their caches; FlashAttention 4 and others go on silently when they
    cannot keep a kernel.

    Raises:
        WrongArguments: no library can be loaded from there.
        OSError: there is not a MiB left.
    """
    found = os.statvfs(folder)
    if found.f_flag & getattr(os, "ST_NOEXEC", 0):  # of Linux
        raise WrongArguments(
            f"no library can be loaded from {folder}: its file system is mounted noexec, and every task would fail. "
            "Likely cause: `--tmpfs /tmp` of `docker run`, which is noexec by default. Next step: `--tmpfs /tmp:exec`, "
            "or another folder (--root, --work, TMPDIR)."
        )
    require_space(folder)


def require_space(folder: Path) -> None:
    """Raises `OSError` where there is not a MiB left."""
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _LEAST_FREE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@contextmanager
def folder_aside(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder PARENT/PREFIX... for what is not whole yet; on the same file system, so that a rename is enough.

    It is removed afterwards.

    Raises:
        OSError: it cannot be made, or the disk is full.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent.absolute()) as name:
        yield Path(name)
