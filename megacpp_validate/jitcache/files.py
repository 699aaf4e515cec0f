"""The files of one architecture's caches: which of them count, their hashes, and what appeared since.

Locks and half-written files are temporary: no library reads them as a cache, and no archive holds them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import ClassVar, Final

from ..errors import Exit, ToolError
from .layout import LIBRARIES, LOCKS, STATE

_READERS: Final = 4  # hashing lets other threads run
# What compilers and locks leave on the way: Triton (tmp.pid_*, lock), Inductor (locks/, .PID.THREAD.tmp, and tmp.UUID
# among Triton's, which stays where another process was first), FlashAttention 4 (.KEY.PID.tmp.o, KEY.lock), DeepGEMM
# (tmp/ below its folder), copies of the driver's (.KEY.PID.tmp), network file systems (.nfs*).
_TEMPORARY_FOLDER: Final = re.compile(rf"tmp\..*|__pycache__|{LOCKS}|{re.escape(STATE)}")
_TEMPORARY_FILE: Final = re.compile(r"lock|.*\.lock|.*\.tmp|\..*\.tmp\.o|\.nfs.*")
_DEEP_GEMM_TMP: Final = ("deep_gemm", "tmp")
_DRIVER: Final = "cuda"
# The driver writes it in any process, and finds its kernels without it (CUDA 13.0, one H200: none of 15 was compiled
# again). Sealed, it would be another file a moment later.
_DRIVER_INDEX: Final = f"{_DRIVER}/index"
# What a compiler makes, and nothing else does: its appearance is a compile.
_PRODUCTS: Final = (".cubin", ".o", ".ptx", ".so")
_GRAPHS: Final = "/fxgraph/"  # one file a graph that TorchInductor compiled, without a suffix


class CacheChanged(ToolError):
    """The files of a cache are not those of its manifest; the text names them."""

    exit: ClassVar[Exit] = Exit.CLOSED


@dataclass(frozen=True)
class Listed:
    """A file as a folder lists it; `path` is relative to ROOT/ARCH, with slashes."""

    path: str
    bytes: int
    mtime_ns: int


def list_files(folder: Path) -> tuple[Listed, ...]:
    """Every file of the caches that counts, sorted.

    Args:
        folder: ROOT/ARCH.

    Raises:
        CacheChanged: there is a link, a socket, or the like, or a name that a manifest cannot hold.
        OSError: it cannot be read.
    """
    return tuple(sorted(_walk(folder), key=lambda listed: listed.path))


def _walk(folder: Path) -> Iterator[Listed]:
    waiting = [name for name in LIBRARIES if (folder / name).is_dir() and not (folder / name).is_symlink()]
    while waiting:
        place = waiting.pop()
        # What other processes rename or remove meanwhile was temporary.
        with suppress(FileNotFoundError), os.scandir(folder / place) as entries:
            for entry in entries:
                path = f"{place}/{entry.name}"
                plain = not entry.is_symlink() and (entry.is_dir() or entry.is_file())
                if not plain or path.encode(errors="replace").decode() != path:  # a name on disk is bytes
                    raise CacheChanged(
                        f"{str(folder / path)!r} is not a plain file with a name in UTF-8. Likely cause: somebody put "
                        "it there, or in the place of a file; no compiler does. Next step: remove it; where a file "
                        "was, import or prewarm again."
                    )
                if entry.is_dir():
                    if not _is_temporary_folder(path):
                        waiting.append(path)
                elif not is_temporary(path):
                    with suppress(FileNotFoundError):
                        found = entry.stat()
                        yield Listed(path, found.st_size, found.st_mtime_ns)


def _is_temporary_folder(path: str) -> bool:
    parts = path.split("/")
    return tuple(parts[:2]) == _DEEP_GEMM_TMP or any(map(_TEMPORARY_FOLDER.fullmatch, parts))


def is_temporary(path: str) -> bool:
    """Whether a file is nobody's kernel: a lock, something half written, the driver's index.

    Args:
        path: relative to ROOT/ARCH, with slashes.
    """
    folder, _, name = path.rpartition("/")
    return path == _DRIVER_INDEX or _is_temporary_folder(folder) or _TEMPORARY_FILE.fullmatch(name) is not None


def remove_temporary(folder: Path) -> None:
    """Remove locks and half-written files, whose processes are gone: a lock of root's stops every other user.

    Args:
        folder: ROOT/ARCH, where nothing compiles now.

    Raises:
        OSError: somebody else owns one.
    """
    for name in LIBRARIES:
        for place, _, files in os.walk(folder / name, topdown=False):
            relative = Path(place).relative_to(folder).as_posix()
            if _is_temporary_folder(relative):
                shutil.rmtree(place)
                continue
            for file in files:
                if is_temporary(f"{relative}/{file}"):
                    Path(place, file).unlink()


def hash_file(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits. Raises `OSError`."""
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def hash_files(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 by path. Raises `OSError`."""
    names = tuple(paths)
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(lambda name: hash_file(folder / name), names), strict=True))


def find_products(before: Mapping[str, Listed], after: Iterable[Listed]) -> tuple[str, ...]:
    """Paths of compiled kernels that appeared, or changed, between two listings of one folder.

    A file of the driver's cache has no suffix, and is one where it appeared: the driver may touch those that it finds.
    """
    changed = [listed.path for listed in after if listed != before.get(listed.path)]
    return tuple(path for path in changed if _is_product(path, path in before))


def _is_product(path: str, was_there: bool) -> bool:
    if library_of(path) == _DRIVER:
        return not was_there
    return path.endswith(_PRODUCTS) or _GRAPHS in path


def library_of(path: str) -> str:
    """Whose cache a file lies in."""
    return path.partition("/")[0]
