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

A cache that does not fit is not an error for the libraries, which miss and compile. So the manifest records what their
keys hold, and a stack is compared with it before a training run waits for compilers.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from ..errors import EvidenceMissing, Exit, ToolError, WrongArguments, writing_to
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen

NVCC: Final = "nvcc"  # compiles DeepGEMM's kernels; NVRTC fails on the headers of CUDA 13 (bridge/deep_gemm.py)

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


class ManifestInvalid(EvidenceMissing):
    """There is no manifest, or an invalid one."""


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


def cache_variables(root: Path | str, arch: str) -> dict[str, str]:
    """Environment variables that put every cache below `ROOT/ARCH`; they must stand before the libraries are imported.

    Args:
        root: absolute, because processes start in folders of their own.
        arch: such as "sm_90a"; "cpu" without a GPU.

    Raises:
        WrongArguments: `arch` is not an architecture.
    """
    place = arch_folder(Path(root), arch)
    return {
        **{variable: str(place / folder) for folder, variable in _FOLDERS.items()},
        "TRITON_CACHE_AUTOTUNING": "1",  # else every process measures its configurations again, from the same kernels
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # off by default
        "DG_JIT_USE_NVRTC": "0",  # part of DeepGEMM's keys
        "CUDA_CACHE_DISABLE": "0",  # else it keeps nothing, and nobody sees what it compiles
        "CUDA_CACHE_MAXSIZE": str(_CUDA_CACHE_BYTES),
        ROOT_VARIABLE: str(root),
        ARCH_VARIABLE: arch,
        MODE_VARIABLE: NVCC,
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


class Listed(NamedTuple):
    """Size and time of a file."""

    bytes: int
    mtime_ns: int


def list_files(folder: Path) -> dict[str, Listed]:
    """Every file of the caches that counts: its path relative to ROOT/ARCH, with slashes -> size and time; sorted.

    Args:
        folder: ROOT/ARCH.

    Raises:
        CacheChanged: there is a link, a socket, or the like.
        OSError: it cannot be read.
    """
    found = dict[str, Listed]()
    caches = [folder / name for name in LIBRARIES if not (folder / name).is_symlink()]
    for place, folders, files in (step for cache in caches for step in os.walk(cache)):
        relative = Path(place).relative_to(folder).as_posix()
        for name in (*folders, *files):
            path = f"{relative}/{name}"
            with suppress(FileNotFoundError):  # what other processes rename or remove meanwhile was temporary
                seen = (folder / path).lstat()
                if not (stat.S_ISDIR(seen.st_mode) or stat.S_ISREG(seen.st_mode)):
                    raise CacheChanged(
                        f"{folder / path} is not a plain file. Next step: remove it; where a file was, import or "
                        "prewarm again."
                    )
                if name in files and not is_temporary(path):
                    found[path] = Listed(seen.st_size, seen.st_mtime_ns)
        folders[:] = [name for name in folders if not _is_temporary_folder(f"{relative}/{name}")]
    return dict(sorted(found.items()))


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
    for path in (path for name in LIBRARIES for path in (folder / name).rglob("*")):
        if path.is_file() and is_temporary(path.relative_to(folder).as_posix()):
            path.unlink()


def hash_files(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 by path, as hexadecimal digits. Raises `OSError`."""
    hashes = {}
    for path in paths:
        with (folder / path).open("rb") as stream:
            hashes[path] = file_digest(stream, "sha256").hexdigest()
    return hashes


def find_products(before: Mapping[str, Listed], after: Mapping[str, Listed]) -> Iterator[str]:
    """Paths of compiled kernels that appeared, or changed, between two listings of one folder.

    A file of the driver's cache has no suffix, and is one where it appeared: the driver may touch those that it finds.
    """
    for path in (path for path, listed in after.items() if listed != before.get(path)):
        if path not in before if library_of(path) == DRIVER else path.endswith(_PRODUCTS) or _GRAPHS in path:
            yield path


def library_of(path: str) -> str:
    """The library in whose cache a file lies."""
    return path.partition("/")[0]


# --- the manifest -----------------------------------------------------------------------------------------------------

SCHEMA: Final = "megacpp-validate/jit-manifest/1"
_HEX: Final = r"^[0-9a-f]{64}$"


class JitCompile(Frozen):
    """One kernel that was compiled.

    Attributes:
        library: whose compiler: "triton", "inductor", "cute", "fa4", "deep_gemm".
        kernel: its name there.
        shape: what it was compiled for: sizes, dtypes, whatever tells it from another of its name.
        seconds: that it took; 0 where nobody measured.
        looked_for: key or file that was not in the cache; empty where the library does not report it.
    """

    library: str
    kernel: str
    shape: str = ""
    seconds: float = Field(default=0.0, ge=0.0)
    looked_for: str = ""


class StackDifference(Frozen):
    """One thing in which a cache and a stack differ.

    Attributes:
        what: which: "torch", "include path".
        recorded: in the manifest.
        observed: here.
        matters: to which caches.
    """

    what: str
    recorded: str
    observed: str
    matters: str = ""


class CompilerOf(Frozen):
    """What compiles DeepGEMM's kernels, whose key holds it: its path and version."""

    mode: str = ""
    path: str = ""
    version: str = ""


class StackSeen(Frozen):
    """A stack as a process in it reports it.

    Attributes:
        machine: kind of CPU: FlashAttention 4 and TorchInductor keep host code.
        versions: by package; one that is not installed is absent. "gpu" and "driver" stand among them on a GPU.
        include_paths: of the headers that DeepGEMM compiles with.
    """

    machine: str
    versions: dict[str, str]
    compiler: CompilerOf = CompilerOf()
    include_paths: tuple[str, ...] = ()


class TaskDone(Frozen):
    """A task that was finished, and what it compiled.

    Attributes:
        asked: libraries that it compiled for or found in a cache when it was finished.
    """

    id: str
    code: str
    settings: dict[str, str] = Field(default_factory=dict)
    ranks: int = 1
    seconds: float = 0.0
    compiled: tuple[JitCompile, ...] = ()
    asked: tuple[str, ...] = ()


class FileSeen(Frozen):
    """One file of the caches.

    Attributes:
        path: relative to ROOT/ARCH, with slashes.
        mtime_ns: ninja, which builds torch extensions, builds again what it finds older than a source.
        names_root: whether the folder that it was made in stands in it: Triton's groups are looked up by that.
    """

    path: str
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_HEX)
    mtime_ns: int = Field(ge=-(2**63), lt=2**63)  # a file system keeps no others
    names_root: bool = False


class Manifest(Frozen):
    """What lies in ROOT/ARCH.

    Attributes:
        architecture: "sm_90a"; "cpu".
        target: row of `matrix/targets.toml` whose tasks filled it.
        folder: ROOT/ARCH, absolute, as it was when the caches were filled.
        mode: what DeepGEMM compiled with.
        tasks: that are finished.
        missing: tasks of the target that are not, such as those that need a GPU.
        files: every file that counts, sorted.
        variables: of an earlier version.
    """

    schema_id: Literal["megacpp-validate/jit-manifest/1"] = SCHEMA
    architecture: str
    target: str
    folder: str
    mode: Literal["nvcc"] = NVCC
    stack: StackSeen
    tasks: tuple[TaskDone, ...]
    missing: tuple[str, ...] = ()
    files: tuple[FileSeen, ...]
    variables: dict[str, str] | None = None
    made: str = ""
    tool: str = ""
    commit: str = ""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def sizes(self) -> dict[str, int]:
        """Library -> bytes, of each that has a file."""
        found = Counter[str]()
        for file in self.files:
            found[library_of(file.path)] += file.bytes
        return dict(sorted(found.items()))


def describe_files(folder: Path) -> tuple[FileSeen, ...]:
    """Every file of ROOT/ARCH that counts, with its hash.

    Raises:
        CacheChanged: a link lies there.
        OSError: a file cannot be read.
    """
    listed = list_files(folder)
    hashes, rows = hash_files(folder, listed), list[FileSeen]()
    for path, (size, mtime_ns) in listed.items():
        names_root = path.endswith(".json") and str(folder).encode() in (folder / path).read_bytes()
        row = FileSeen(path=path, bytes=size, sha256=hashes[path], mtime_ns=mtime_ns, names_root=names_root)
        rows.append(row)
    return tuple(rows)


def hash_line(text: bytes) -> str:
    """The file beside a manifest, as `sha256sum -c manifest.sha256` reads it."""
    return f"{sha256(text).hexdigest()}  {MANIFEST}\n"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a ROOT/ARCH that is not sealed. Raises `OSError`."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False)
    write_whole(folder / MANIFEST, text + "\n")


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest of ROOT/ARCH and its hash, as "sha256:...".

    Raises:
        CacheChanged: the cache is sealed, and the manifest is not the one whose hash lies beside it.
        ManifestInvalid: there is none, or it is damaged.
    """
    sealed = folder / MANIFEST_HASH
    try:
        text = (folder / MANIFEST).read_bytes()
        if sealed.exists() and sealed.read_text(errors="replace") != hash_line(text):
            raise CacheChanged(
                f"the manifest of {folder} does not hash to its {MANIFEST_HASH}. Likely cause: an edit. "
                "Next step: take the cache from where it was exported, or prewarm again."
            )
        return Manifest.model_validate_json(text), f"sha256:{sha256(text).hexdigest()}"
    except (OSError, ValueError) as fault:
        raise ManifestInvalid(
            f"{folder} has no valid manifest: {fault}. Likely cause: nothing was prewarmed there, another user owns "
            "the folder, or another version wrote it. Next step: `nox -s prewarm`."
        ) from fault


# --- does it fit a stack? --------------------------------------------------------------------------------------------

# TorchInductor compiles C++ only where it has no GPU, for what the compiler and the CPU can. Its key holds the command
# line, and with it the folders of headers: another environment of the same versions compiles anew (torch 2.13).
_OF_CPU: Final = ("c++", "c++ headers", "isa")


def compare_stack(
    manifest: Manifest, stack: StackSeen, architecture: str, keys: Mapping[str, Collection[str]]
) -> tuple[StackDifference, ...]:
    """In what a cache and a stack differ, as far as a key of a library that has files there would miss.

    Args:
        manifest: of the cache.
        stack: of here, as a process in it reports it.
        architecture: that is requested here.
        keys: what may differ -> the libraries whose keys hold it, of matrix/prewarm.toml.
    """
    recorded = _list_fields(manifest.stack, manifest.architecture)
    observed = _list_fields(stack, architecture)
    there, found = set(manifest.sizes), list[StackDifference]()
    for what, libraries in keys.items():
        before, now = recorded.get(what, "not installed"), observed.get(what, "not installed")
        affected = there & set(libraries)
        if what in _OF_CPU and manifest.architecture != CPU:
            affected -= {"inductor"}
        if affected and before != now:
            matters = ", ".join(sorted(affected))
            found.append(StackDifference(what=what, recorded=before, observed=now, matters=matters))
    return tuple(found)


def _list_fields(stack: StackSeen, architecture: str) -> dict[str, str]:
    """Every field of a stack by its name in matrix/prewarm.toml; the patch release of Python is in no key."""
    return {
        **stack.versions,
        "python": ".".join(stack.versions.get("python", "").split(".")[:2]),
        "architecture": architecture,
        "machine": stack.machine,
        "compiler": stack.compiler.version or "none",
        "include path": ":".join(stack.include_paths),
    }
