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
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from filelock import FileLock, Timeout

from ..errors import InfrastructureFailed, NoEnvironment, WrongArguments, writing_to

Mode = Literal["nvcc", "nvrtc"]
NVCC: Final = "nvcc"
NVRTC: Final = "nvrtc"

ROOT_VARIABLE: Final = "MEGACPP_JIT_ROOT"
ARCH_VARIABLE: Final = "MEGACPP_JIT_ARCH"
MODE_VARIABLE: Final = "MEGACPP_JIT_MODE"

CPU: Final = "cpu"
MANIFEST: Final = "manifest.json"
MANIFEST_HASH: Final = "manifest.sha256"
STATE: Final = ".prewarm"  # of a prewarm that is under way; never exported
DRAFT: Final = f"{STATE}/{MANIFEST}"  # what lies in a folder that is not sealed, as far as a prewarm knows
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
_CUDA_CACHE_BYTES: Final = 4 * 2**30  # the driver's own limit; what is over it, the driver throws away unasked
_LEAST_FREE: Final = 2**20  # bytes; a kernel has 30 kB to 1 MB
_ARCH: Final = re.compile(r"cpu|sm_\d+[af]?")


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


# --- whether a folder can hold caches --------------------------------------------------------------------------------


def require_usable(folder: Path, option: str) -> None:
    """Make a folder, and refuse one that cannot be written, or from which no library can be loaded.

    Writing says more than its mode: a mount may be read-only, and root may write anything. Triton and TorchInductor
    load libraries from their caches; FlashAttention 4 and others go on silently when they cannot keep a kernel.

    Args:
        option: that names the folder.

    Raises:
        WrongArguments: it cannot be used.
        OSError: there is not a MiB left.
    """
    require_writable(folder, option)
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):  # of Linux
        raise WrongArguments(
            f"no library can be loaded from {folder}: its file system is mounted noexec, and every task would fail. "
            "Likely cause: `--tmpfs /tmp` of `docker run`, which is noexec by default. Next step: `--tmpfs /tmp:exec`, "
            "or another folder (--root, --work, TMPDIR)."
        )
    require_space(folder)


def require_writable(folder: Path, option: str) -> None:
    """Make a folder, and refuse one that cannot be written. Raises as `require_usable`."""
    with writing_to(folder, "files", option):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()


def require_space(folder: Path) -> None:
    """Raises `OSError` where there is not a MiB left."""
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _LEAST_FREE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def require_temporary() -> Path:
    """The folder for temporary files.

    Raises:
        NoEnvironment: there is none.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as fault:
        raise NoEnvironment(
            f"there is no folder for temporary files: {fault.strerror or fault}. Likely cause: a read-only root, or a "
            "full disk. Next step: mount one on /tmp (`--tmpfs /tmp:exec` of `docker run`), or name one in TMPDIR."
        ) from fault


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


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """ROOT/ARCH in which no other prewarm works meanwhile. Raises `InfrastructureFailed`."""
    if not (folder / STATE).is_dir():  # no prewarm was ever here
        yield
        return
    try:
        with FileLock(folder / STATE / "lock", timeout=0):
            yield
    except Timeout as fault:
        raise InfrastructureFailed(
            f"another prewarm works in {folder}. Likely cause: it was started twice, or is not at its end yet. Next "
            "step: wait for it, or give another --root."
        ) from fault
