"""Where every just-in-time compiler keeps what it has compiled: one root, one folder an architecture below it.

An architecture has a folder of its own because not every key holds it: FlashAttention 4 gives `bwd_pre` one name for
sm_90a, sm_120a and sm_121a, and each has another content (4.0.0b36, seen 2026-11-21).

    ROOT/sm_90a/triton            Triton, its autotuning too
               /inductor          TorchInductor: graphs, generated code, C++ libraries
               /cute              CuTe DSL
               /fa4               FlashAttention 4
               /deep_gemm         DeepGEMM
               /cuda              the CUDA driver's own, for what ships as PTX
               /torch_extensions  torch.utils.cpp_extension
               /manifest.json     what lies there, and which stack it is for

Locks and half-written files are temporary: no library reads them as a cache, and no archive holds them.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import ClassVar, Final, Literal

from ..errors import Exit, ToolError, WrongArguments, writing_to

Mode = Literal["nvcc", "nvrtc"]
NVCC: Final = "nvcc"
NVRTC: Final = "nvrtc"

ROOT_VARIABLE: Final = "MEGACPP_JIT_ROOT"
ARCH_VARIABLE: Final = "MEGACPP_JIT_ARCH"
MODE_VARIABLE: Final = "MEGACPP_JIT_MODE"

CPU: Final = "cpu"
MANIFEST: Final = "manifest.json"
MANIFEST_HASH: Final = "manifest.sha256"  # what makes a cache a sealed one
STATE: Final = ".prewarm"  # lock and logs of a prewarm; never exported
LOCKS: Final = "locks"  # of processes that compile; never exported

_FOLDERS: Final = {
    "triton": "TRITON_CACHE_DIR",
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "cute": "CUTE_DSL_CACHE_DIR",
    "fa4": "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "deep_gemm": "DG_JIT_CACHE_DIR",
    "cuda": "CUDA_CACHE_PATH",
    "torch_extensions": "TORCH_EXTENSIONS_DIR",
}
LIBRARIES: Final = tuple(_FOLDERS)
DRIVER: Final = "cuda"
_CUDA_CACHE_BYTES: Final = 4 * 2**30  # the driver's own limit; what is over it, the driver throws away unasked
_ARCH: Final = re.compile(r"cpu|sm_\d+[af]?")
_READERS: Final = 4  # hashing lets other threads run

# What compilers and locks leave on the way: Triton (tmp.pid_*, lock), Inductor (locks/, .PID.THREAD.tmp, and tmp.UUID
# among Triton's, which stays where another process was first), FlashAttention 4 (.KEY.PID.tmp.o, KEY.lock), DeepGEMM
# (tmp/ below its folder), copies of the driver's (.KEY.PID.tmp), network file systems (.nfs*).
_TEMPORARY_FOLDER: Final = re.compile(rf"tmp\..*|__pycache__|{LOCKS}|{re.escape(STATE)}")
_TEMPORARY_FILE: Final = re.compile(r"lock|.*\.lock|.*\.tmp|\..*\.tmp\.o|\.nfs.*")
_DEEP_GEMM_TMP: Final = ("deep_gemm", "tmp")
# The driver writes it in any process, and finds its kernels without it (CUDA 13.0, one H200: none of 15 was compiled
# again). Sealed, it would be another file a moment later.
_DRIVER_INDEX: Final = f"{DRIVER}/index"
# What a compiler makes, and nothing else does: its appearance is a compile.
_PRODUCTS: Final = (".cubin", ".o", ".ptx", ".so")
_GRAPHS: Final = "/fxgraph/"  # one file a graph that TorchInductor compiled, without a suffix


class CacheChanged(ToolError):
    """The files of a cache are not those of its manifest; the text names them."""

    exit: ClassVar[Exit] = Exit.CLOSED


def cache_arch(arch: str) -> str:
    """The folder of a target's architecture: "sm_90" of `matrix/targets.toml` is sm_90a, a target without one is cpu.

    The kernels are those of the architecture's own instruction set (the `a`), which every compiler here is asked for.
    """
    return f"{arch}a" if arch else CPU


def arch_folder(root: Path, arch: str) -> Path:
    """Where the caches of an architecture lie.

    Raises:
        WrongArguments: `arch` is not an architecture, as a path into another folder is not.
    """
    if not _ARCH.fullmatch(arch):
        raise WrongArguments(
            f"{arch!r} is not an architecture of a JIT cache. Next step: name one such as sm_90a, or cpu."
        )
    return root / arch


def cache_variables(root: Path | str, arch: str, *, nvrtc: bool) -> dict[str, str]:
    """Environment variables that put every cache below `ROOT/ARCH`; they must stand before the libraries are imported.

    Args:
        root: absolute, because processes start in folders of their own.
        arch: such as "sm_90a"; "cpu" without a GPU.
        nvrtc: DeepGEMM compiles with NVRTC (fast to compile) and not with NVCC. It is part of DeepGEMM's own keys.

    Raises:
        WrongArguments: `root` is relative, or `arch` is not an architecture.
    """
    place = arch_folder(Path(root), arch)
    if not place.is_absolute():
        raise WrongArguments(f"the root of the JIT caches is relative: {root}. Next step: give an absolute path.")
    return {
        **{variable: str(place / folder) for folder, variable in _FOLDERS.items()},
        "TRITON_CACHE_AUTOTUNING": "1",  # else every process measures its configurations again, from the same kernels
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # off by default
        "DG_JIT_USE_NVRTC": "1" if nvrtc else "0",
        "CUDA_CACHE_DISABLE": "0",  # else it keeps nothing, and nobody sees what it compiles
        "CUDA_CACHE_MAXSIZE": str(_CUDA_CACHE_BYTES),
        ROOT_VARIABLE: str(root),
        ARCH_VARIABLE: arch,
        MODE_VARIABLE: NVRTC if nvrtc else NVCC,
    }


def require_usable(folder: Path, option: str) -> None:
    """Make a folder, and refuse one that cannot be written, or from which no library can be loaded.

    Writing says more than its mode: a mount may be read-only, and root may write anything. Triton and TorchInductor
    load libraries from their caches; FlashAttention 4 and others go on silently when they cannot keep a kernel.

    Args:
        option: that names the folder.

    Raises:
        WrongArguments: it cannot be used.
    """
    with writing_to(folder, "files", option):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):  # of Linux
        raise WrongArguments(
            f"no library can be loaded from {folder}: its file system is mounted noexec. Likely cause: `--tmpfs /tmp` "
            "of `docker run`. Next step: `--tmpfs /tmp:exec`, or another folder (--root, --work, TMPDIR)."
        )


# --- the files of one architecture's caches ---------------------------------------------------------------------------


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
    found = []
    caches = [folder / name for name in LIBRARIES if not (folder / name).is_symlink()]
    for place, folders, files in (step for cache in caches for step in os.walk(cache)):
        relative = Path(place).relative_to(folder).as_posix()
        for name in (*folders, *files):
            path = f"{relative}/{name}"
            with suppress(FileNotFoundError):  # what other processes rename or remove meanwhile was temporary
                seen = (folder / path).lstat()
                plain = stat.S_ISDIR(seen.st_mode) or stat.S_ISREG(seen.st_mode)
                if not plain or path.encode(errors="replace").decode() != path:  # a name on disk is bytes
                    raise CacheChanged(
                        f"{str(folder / path)!r} is not a plain file with a name in UTF-8. Next step: remove it; where "
                        "a file was, import or prewarm again."
                    )
                if name in files and not is_temporary(path):
                    found.append(Listed(path, seen.st_size, seen.st_mtime_ns))
        folders[:] = [name for name in folders if not _is_temporary_folder(f"{relative}/{name}")]
    return tuple(sorted(found, key=lambda listed: listed.path))


def _is_temporary_folder(path: str) -> bool:
    parts = path.split("/")
    return tuple(parts[:2]) == _DEEP_GEMM_TMP or any(map(_TEMPORARY_FOLDER.fullmatch, parts))


def is_temporary(path: str) -> bool:
    """Whether a file is no kernel: a lock, something half written, the driver's index.

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
    for path in sorted(folder.glob("*/**/*"), reverse=True):
        relative = path.relative_to(folder).as_posix()
        if relative.startswith(LIBRARIES) and path.is_dir() and _is_temporary_folder(relative):
            shutil.rmtree(path)
        elif relative.startswith(LIBRARIES) and path.is_file() and is_temporary(relative):
            path.unlink()


def hash_files(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 by path, as hexadecimal digits. Raises `OSError`."""

    def hash_file(path: str) -> str:
        with (folder / path).open("rb") as stream:
            return file_digest(stream, "sha256").hexdigest()

    names = tuple(paths)
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(hash_file, names), strict=True))


def find_products(before: Mapping[str, Listed], after: Iterable[Listed]) -> Iterator[str]:
    """Paths of compiled kernels that appeared, or changed, between two listings of one folder.

    A file of the driver's cache has no suffix, and is one where it appeared: the driver may touch those that it finds.
    """
    for path in (listed.path for listed in after if listed != before.get(listed.path)):
        if path not in before if library_of(path) == DRIVER else path.endswith(_PRODUCTS) or _GRAPHS in path:
            yield path


def library_of(path: str) -> str:
    """The library in whose cache a file lies."""
    return path.partition("/")[0]
