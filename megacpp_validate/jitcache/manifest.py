"""The files of one architecture's caches, and their manifest: what lies there, and which stack will find it.

Locks and half-written files are temporary: no library reads them as a cache, and no archive holds them.

A cache that does not fit is not an error for the libraries, which miss and compile. So the manifest records what their
keys hold, and a stack is compared with it before a training run waits for compilers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field, ValidationError, model_validator

from ..errors import EvidenceMissing, Exit, ToolError, WrongArguments
from ..evidence.strict_json import read_strict_json
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .layout import CPU, DRAFT, LIBRARIES, LOCKS, MANIFEST, MANIFEST_HASH, STATE, arch_folder, cache_variables
from .result import JitCacheSize, JitCompile, StackDifference

SCHEMA: Final = "megacpp-validate/jit-manifest/1"
_HEX: Final = r"^[0-9a-f]{64}$"
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
                        f"{str(folder / path)!r} is not a plain file with a name in UTF-8. Likely cause: somebody put "
                        "it there, or in the place of a file; no compiler does. Next step: remove it; where a file "
                        "was, import or prewarm again."
                    )
                if name in files and not is_temporary(path):
                    found.append(Listed(path, seen.st_size, seen.st_mtime_ns))
        folders[:] = [name for name in folders if not _is_temporary_folder(f"{relative}/{name}")]
    return tuple(sorted(found, key=lambda listed: listed.path))


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
    return tuple(
        path
        for path in changed
        if (path not in before if library_of(path) == _DRIVER else path.endswith(_PRODUCTS) or _GRAPHS in path)
    )


def library_of(path: str) -> str:
    """Whose cache a file lies in."""
    return path.partition("/")[0]


# --- the manifest -----------------------------------------------------------------------------------------------------


class ManifestInvalid(EvidenceMissing):
    """There is no manifest, or an invalid one."""


class CompilerOf(Frozen):
    """What compiles DeepGEMM's kernels, whose key holds it: mode "nvcc" or "nvrtc", its path and version."""

    mode: str = ""
    path: str = ""
    version: str = ""


class StackSeen(Frozen):
    """A stack as a process in it tells.

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
        compiled: by whichever run of it.
        asked: libraries that it compiled for or found in a cache when it was finished. None where nobody knows: its
            process counted no hits, or an earlier version wrote it.
        key: hash of what must be the same for it to stay finished; empty of an earlier version.
    """

    id: str
    code: str
    settings: dict[str, str] = Field(default_factory=dict)
    ranks: int = 1
    seconds: float = 0.0
    compiled: tuple[JitCompile, ...] = ()
    asked: tuple[str, ...] | None = None
    key: str = ""


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
        mode: "nvcc" or "nvrtc": what DeepGEMM was told to compile with.
        tasks: that are finished.
        missing: tasks of the target that are not, such as those that need a GPU.
        files: every file that counts, sorted. Earlier versions counted more: `parse_manifest` leaves them out.
        variables: of the compilers, as `hash_variables` has them; None of an earlier version.
    """

    schema_id: Literal["megacpp-validate/jit-manifest/1"] = SCHEMA
    architecture: str
    target: str
    folder: str
    mode: str = Field(pattern=r"^(nvcc|nvrtc)$")
    stack: StackSeen
    tasks: tuple[TaskDone, ...]
    missing: tuple[str, ...] = ()
    files: tuple[FileSeen, ...]
    variables: dict[str, str] | None = None
    made: str = ""
    tool: str = ""
    commit: str = ""

    @model_validator(mode="after")
    def _require_plain_paths(self) -> Manifest:
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a file is in it twice")
        for path in paths:
            parts = path.split("/")
            if "\\" in path or "\0" in path or {"", ".", ".."} & set(parts) or len(parts) < 2:
                raise ValueError(f"the path {path!r} leads elsewhere")
        return self

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def sizes(self) -> tuple[JitCacheSize, ...]:
        """Files and bytes, a row a library that has any."""
        return measure_caches((file.path, file.bytes) for file in self.files)

    def shapes_of(self, library: str, kernel: str) -> tuple[str, ...]:
        """What a kernel is in the cache for, as the tasks told."""
        told = (one for task in self.tasks for one in task.compiled)
        return tuple(dict.fromkeys(one.shape for one in told if (one.library, one.kernel) == (library, kernel)))


def describe_files(folder: Path, known: Iterable[FileSeen] = ()) -> tuple[FileSeen, ...]:
    """Every file of ROOT/ARCH that counts, with its hash.

    Args:
        known: rows whose hashes hold for files of the same size and time, which are not read again.

    Raises:
        CacheChanged: a link lies there.
        OSError: a file cannot be read.
    """
    listed = list_files(folder)
    rows = {(row.path, row.bytes, row.mtime_ns): row for row in known if not row.names_root}
    hashes = hash_files(folder, (file.path for file in listed if (file.path, file.bytes, file.mtime_ns) not in rows))

    def row(file: Listed) -> FileSeen:
        if file.path not in hashes:
            return rows[file.path, file.bytes, file.mtime_ns]
        names_root = file.path.endswith(".json") and str(folder).encode() in (folder / file.path).read_bytes()
        return FileSeen(
            path=file.path, bytes=file.bytes, sha256=hashes[file.path], mtime_ns=file.mtime_ns, names_root=names_root
        )  # fmt: skip

    return tuple(map(row, listed))


def measure_caches(files: Iterable[tuple[str, int]]) -> tuple[JitCacheSize, ...]:
    """Files and bytes, a row a library, from paths and sizes."""
    found: dict[str, list[int]] = defaultdict(list)
    for path, size in files:
        found[library_of(path)].append(size)
    return tuple(JitCacheSize(library=name, files=len(all_), bytes=sum(all_)) for name, all_ in sorted(found.items()))


def manifest_text(manifest: Manifest) -> str:
    """The manifest as JSON; the same text for the same manifest."""
    return json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def hash_manifest(text: bytes) -> str:
    """By which a manifest is named: "sha256:..."."""
    return f"sha256:{sha256(text).hexdigest()}"


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write it and its hash into ROOT/ARCH, each whole; `sha256sum -c manifest.sha256` checks it there.

    Raises:
        OSError: the folder cannot be written.
    """
    text = manifest_text(manifest)
    digest = hash_manifest(text.encode())
    write_whole(folder / MANIFEST, text)
    write_whole(folder / MANIFEST_HASH, hash_line(digest))
    return digest


def hash_line(digest: str) -> str:
    """The file beside a manifest, as sha256sum reads it."""
    return f"{digest.removeprefix('sha256:')}  {MANIFEST}\n"


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest of ROOT/ARCH and its hash.

    Raises:
        CacheChanged: it is not the one whose hash lies beside it.
        ManifestInvalid: there is none, or it is damaged.
    """
    places = (folder / MANIFEST, folder / MANIFEST_HASH)
    if not all(place.is_file() for place in places):  # reading a pipe would wait for ever
        raise ManifestInvalid(
            f"{folder} has no manifest. Likely cause: nothing was prewarmed there, or a prewarm was killed. Next step: "
            "`nox -s prewarm -- --target TARGET --root ROOT`, which continues with what is missing."
        )
    try:
        text, line = (place.read_bytes() for place in places)
    except OSError as fault:
        raise ManifestInvalid(
            f"the manifest of {folder} cannot be read: {fault}. Likely cause: another user owns it. Next step: let "
            "that user give you the right to read it."
        ) from fault
    return parse_manifest(text, line, str(folder))


def read_draft(folder: Path) -> Manifest | None:
    """What a prewarm knew of a ROOT/ARCH that is not sealed; None where it is not there, or damaged."""
    try:
        return Manifest.model_validate_json((folder / DRAFT).read_bytes())
    except (OSError, ValidationError):
        return None


def require_place(root: Path, architecture: str, machine: str = "") -> Path:
    """ROOT/ARCH, once it is clear that it is one, and of this architecture.

    Args:
        root: of all caches.
        architecture: such as "sm_90a".
        machine: kind of CPU, because host code is among what is cached; empty where that is compared later.

    Raises:
        WrongArguments: it is not, or it cannot be read.
    """
    folder = arch_folder(root, architecture)
    try:
        inside = any((root / name).is_file() for name in (MANIFEST, DRAFT))
        found = read_draft(folder)
        if os.access(folder / MANIFEST, os.F_OK):
            found = read_manifest(folder)[0]
    except EvidenceMissing:
        found = None
    except OSError as fault:
        raise WrongArguments(
            f"the JIT caches in {root} cannot be reached: {fault.strerror or fault}. Likely cause: a folder on the way "
            "belongs to another user. Next step: give --root a folder that you can read and write."
        ) from fault
    if inside:
        raise WrongArguments(
            f"{root} is the cache of one architecture, and not the root of them. Likely cause: ROOT/ARCH was given. "
            f"Next step: give {root.parent}."
        )
    there = (found.architecture, found.stack.machine) if found else (architecture, machine)
    if there != (architecture, machine or there[1]):
        raise WrongArguments(
            f"{folder} holds caches of {' on '.join(there)}, and {architecture} on {machine or there[1]} is requested. "
            "Likely cause: a folder was copied under another name, or machines of two kinds share it. Not all "
            "keys hold the architecture, so its kernels would crash. Next step: give another --root, or remove "
            f"{folder}."
        )
    return folder


def parse_manifest(text: bytes, line: bytes, where: str) -> tuple[Manifest, str]:
    """A manifest and its hash from their bytes, with the files that count alone. Raises as `read_manifest`."""
    digest, said = hash_manifest(text), line.decode(errors="replace")
    if said != hash_line(digest):
        raise CacheChanged(
            f"the manifest of {where} is not the one that its hash is of: it hashes to {digest}, and {MANIFEST_HASH} "
            f"holds {said.split('  ')[0][:64]!r}. Likely cause: it was edited or damaged. Next step: take the cache "
            "from where it was exported, or prewarm again."
        )
    try:
        read_strict_json(text)
        manifest = Manifest.model_validate_json(text)
    except ValueError as fault:
        raise ManifestInvalid(
            f"the manifest of {where} is invalid: {fault}. Likely cause: it was written by another version. Next step: "
            "prewarm again with this one."
        ) from fault
    # Earlier versions sealed temporary files too (the driver's index, Triton's tmp.*); they may be gone or changed by
    # now, and the cache is whole.
    counted = tuple(file for file in manifest.files if not is_temporary(file.path))
    return manifest.model_copy(update={"files": counted}), digest


# --- does it fit a stack? --------------------------------------------------------------------------------------------

_ALL: Final = LIBRARIES
# Whose keys hold what; where no such cache has a file, a difference does not matter. Read from the sources: Triton
# 3.7.1 runtime/cache.py (its own files, ptxas), torch 2.11 and 2.13 _inductor/codecache.py (torch, triton, GPU name),
# flash-attn-4 4.0.0b36 cache_utils.py (Python minor, cutlass, tvm_ffi, its sources), DeepGEMM v2.6.1 csrc/jit
# (compiler, its version, flags with the include path). CUDA's own is thrown away at a driver upgrade.
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "python": ("inductor", "cute", "fa4", "torch_extensions"),
    "torch": ("inductor", "triton", "torch_extensions"),
    "triton": ("inductor", "triton"),
    "cutlass": ("cute", "fa4"),
    "apache-tvm-ffi": ("cute", "fa4"),
    "flash-attn-4": ("cute", "fa4"),
    "quack-kernels": ("cute", "fa4"),
    "deep-gemm": ("deep_gemm",),
    "transformer-engine": ("triton",),
    "cuda": ("inductor", "triton", "deep_gemm", "cuda"),
    "gpu": ("inductor",),
    "driver": ("cuda",),
    "working folder": ("cuda",),  # of NVRTC (jit/monitor.py)
}
# TorchInductor compiles C++ only where it has no GPU, for what the compiler and the CPU can. Its key holds the command
# line, and with it the folders of headers: another environment of the same versions compiles anew (torch 2.13).
_KEYS_OF_C: Final = ("c++", "c++ headers", "isa")


def compare_stack(manifest: Manifest, stack: StackSeen, architecture: str, mode: str) -> tuple[StackDifference, ...]:
    """In what a cache and a stack differ, as far as a key of a library that has files there would miss.

    Args:
        manifest: of the cache.
        stack: of here, as a process in it reports it.
        architecture, mode: that are requested here.
    """
    made, there = manifest.stack, {size.library for size in manifest.sizes}
    of_c = ("inductor", "torch_extensions") if manifest.architecture == CPU else ("torch_extensions",)
    rows = [
        ("architecture", manifest.architecture, architecture, _ALL),
        ("machine", made.machine, stack.machine, _ALL),
        *(
            (name, _version(made, name), _version(stack, name), whose)
            for name, whose in (*_KEYS.items(), *((name, of_c) for name in _KEYS_OF_C))
        ),
        ("compiler mode", manifest.mode, mode, ("deep_gemm",)),
        ("compiler", made.compiler.version or "none", stack.compiler.version or "none", ("deep_gemm",)),
        ("include path", ":".join(made.include_paths), ":".join(stack.include_paths), ("deep_gemm",)),
    ]
    return tuple(
        StackDifference(what=what, recorded=recorded, observed=observed, matters=", ".join(sorted(there & set(whose))))
        for what, recorded, observed, whose in rows
        if recorded != observed and (whose is _ALL or there & set(whose))
    )


def _version(stack: StackSeen, name: str) -> str:
    text = stack.versions.get(name) or "not installed"
    return ".".join(text.split(".")[:2]) if name == "python" else text  # its patch release is in no key


# --- variables of the compilers --------------------------------------------------------------------------------------

_PREFIXES: Final = (
    "TRITON_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "CUTE_DSL_", "FLASH_ATTENTION_", "FA_", "DG_",
    "NVTE_", "CUDA_CACHE_",
)  # fmt: skip
_OURS: Final = frozenset(cache_variables(Path("/"), CPU, nvrtc=False))  # each root and architecture has its own
_DIGITS: Final = 12


def hash_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of compilers that somebody set: name -> hash of the value, which may hold a password.

    Args:
        variables: of the environment that compiles.
    """
    names = sorted(name for name in variables if name.startswith(_PREFIXES) and name not in _OURS)
    return {name: sha256(variables[name].encode()).hexdigest()[:_DIGITS] for name in names}


def compare_variables(recorded: Mapping[str, str] | None, here: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that differs from when the caches were filled.

    Nothing is refused: which variable is in which key changes with the libraries' releases. But a cache that is cold
    for no reason that a version shows has one here as a rule.

    Args:
        recorded: of a manifest; None of an earlier version.
        here: of `hash_variables`.
    """
    if recorded is None:
        return ()
    return tuple(
        f"{name} differs from when the cache was filled: kernels with it in their key are compiled again"
        for name in sorted({*recorded, *here})
        if recorded.get(name) != here.get(name)
    )
