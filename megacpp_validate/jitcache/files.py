"""The files of one architecture's caches: which of them count, their hashes, and what appeared since.

Locks and half-written files are passing things: no library reads them as a cache, and none is exported.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from .layout import LIBRARIES, LOCKS, STATE

_CHUNK: Final = 2**20
_READERS: Final = 4  # hashing lets other threads run
# What compilers and locks leave on the way: Triton (tmp.pid_*, lock), Inductor (locks/, .PID.THREAD.tmp, and tmp.UUID
# among Triton's, which stays where another process was first), FlashAttention 4 (.KEY.PID.tmp.o, KEY.lock), DeepGEMM
# (tmp/ below its folder), what is given back of the driver's (.KEY.PID.tmp), network file systems (.nfs*).
_PASSING_FOLDER: Final = re.compile(rf"tmp\..*|__pycache__|{LOCKS}|{re.escape(STATE)}")
_PASSING_FILE: Final = re.compile(r"lock|.*\.lock|.*\.tmp|\..*\.tmp\.o|\.nfs.*")
_DEEP_GEMM_TMP: Final = ("deep_gemm", "tmp")
_DRIVER: Final = "cuda"
# The driver writes it in any process, and finds its kernels without it (CUDA 13.0, one H200: none of 15 was compiled
# again). Sealed, it would be another file a moment later.
_DRIVER_INDEX: Final = f"{_DRIVER}/index"
# What a compiler makes, and nothing else does: its appearance is a compile.
_PRODUCTS: Final = frozenset({".cubin", ".o", ".ptx", ".so"})
_GRAPHS: Final = "fxgraph"  # one file a graph that TorchInductor compiled, without a suffix


class NoPlainFile(ValueError):
    """Something in a cache that is no plain file, such as a link, which would lead out of an archive."""


@dataclass(frozen=True)
class Seen:
    """A file as a folder lists it; `path` is relative to ROOT/ARCH, with slashes."""

    path: str
    bytes: int
    mtime_ns: int


def list_files(folder: Path) -> tuple[Seen, ...]:
    """Every file of the caches that counts, sorted.

    Args:
        folder: ROOT/ARCH.

    Raises:
        NoPlainFile: there is a link, a socket, or the like.
        OSError: it cannot be read.
    """
    return tuple(sorted(_walk(folder), key=lambda seen: seen.path))


def _walk(folder: Path) -> Iterator[Seen]:
    waiting = [name for name in LIBRARIES if (folder / name).is_dir() and not (folder / name).is_symlink()]
    while waiting:
        place = waiting.pop()
        # What other processes rename or remove meanwhile was a passing thing.
        with suppress(FileNotFoundError), os.scandir(folder / place) as entries:
            for entry in entries:
                path = f"{place}/{entry.name}"
                if entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
                    raise NoPlainFile(
                        f"{folder / path} is no plain file. Likely cause: somebody put a link there, or in the place "
                        "of a file; no compiler does. Next step: remove it; where a file was, import or prewarm again."
                    )
                if not _is_text(path):
                    raise NoPlainFile(
                        f"{str(folder / path)!r} has a name that is no text. Likely cause: somebody put it there; no "
                        "compiler does. Next step: remove it."
                    )
                if entry.is_dir():
                    if not _PASSING_FOLDER.fullmatch(entry.name) and tuple(path.split("/"))[:2] != _DEEP_GEMM_TMP:
                        waiting.append(path)
                elif not is_passing(path):
                    with suppress(FileNotFoundError):
                        found = entry.stat()
                        yield Seen(path, found.st_size, found.st_mtime_ns)


def _is_text(path: str) -> bool:
    """Whether a manifest can hold it: a name on disk is bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def drop_passing(folder: Path) -> None:
    """Remove locks and half-written files, whose processes are gone: a lock of root's stops every other user.

    Args:
        folder: ROOT/ARCH, where nothing compiles now.

    Raises:
        OSError: somebody else owns one.
    """
    for name in LIBRARIES:
        for place, _, files in os.walk(folder / name, topdown=False):
            relative = Path(place).relative_to(folder)
            if any(_PASSING_FOLDER.fullmatch(part) for part in relative.parts) or relative.parts[:2] == _DEEP_GEMM_TMP:
                shutil.rmtree(place)
                continue
            for file in files:
                if is_passing(f"{relative.as_posix()}/{file}"):
                    Path(place, file).unlink()


def is_passing(path: str) -> bool:
    """Whether a file is nobody's kernel: a lock, something half written, the driver's index.

    Args:
        path: relative to ROOT/ARCH, with slashes.
    """
    *folders, name = path.split("/")
    return (
        path == _DRIVER_INDEX
        or _PASSING_FILE.fullmatch(name) is not None
        or tuple(folders[:2]) == _DEEP_GEMM_TMP
        or any(_PASSING_FOLDER.fullmatch(folder) for folder in folders)
    )


def hash_file(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    digest = sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def hash_files(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 by path. Raises as `hash_file`."""
    names = tuple(paths)
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(lambda name: hash_file(folder / name), names), strict=True))


def find_products(before: Mapping[str, Seen], after: Iterable[Seen]) -> tuple[str, ...]:
    """Paths of compiled kernels that appeared, or became others, between two listings of one folder.

    A file of the driver's cache has no suffix, and is one where it appeared: the driver may touch those that it finds.
    """
    return tuple(seen.path for seen in after if _is_product(seen, before.get(seen.path)))


def _is_product(now: Seen, before: Seen | None) -> bool:
    if now == before:
        return False
    parts = now.path.split("/")
    if parts[0] == _DRIVER:
        return before is None
    return os.path.splitext(parts[-1])[1] in _PRODUCTS or _GRAPHS in parts[:-1]  # noqa: PTH122 - no file is asked


def library_of(path: str) -> str:
    """Whose cache a file lies in."""
    return path.partition("/")[0]
