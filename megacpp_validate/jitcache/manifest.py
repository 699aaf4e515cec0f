"""The manifest of one architecture's caches: what lies there, what made it, and which stack will find it.

A cache that does not fit is not an error for the libraries, which miss and compile: so whoever hands one on says here
what their keys hold, and whoever takes one compares that before a training run waits for compilers.
"""

from __future__ import annotations

import errno
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from ..errors import EvidenceMissing
from ..evidence.strict_json import read_strict_json
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .files import CacheChanged, is_temporary, library_of
from .layout import CPU, LIBRARIES, MANIFEST, MANIFEST_HASH, cache_variables
from .result import JitCacheSize, JitCompile, StackDifference

SCHEMA: Final = "megacpp-validate/jit-manifest/1"
_HEX: Final = r"^[0-9a-f]{64}$"


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
    """

    id: str
    code: str
    settings: dict[str, str] = Field(default_factory=dict)
    ranks: int = 1
    seconds: float = 0.0
    compiled: tuple[JitCompile, ...] = ()
    asked: tuple[str, ...] | None = None


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
    try:
        for place in (folder / MANIFEST, folder / MANIFEST_HASH):
            if place.exists() and not place.is_file():  # reading a pipe would wait for ever
                raise FileNotFoundError(errno.ENOENT, "not a file", str(place))
        text = (folder / MANIFEST).read_bytes()
        line = (folder / MANIFEST_HASH).read_bytes()
    except OSError as fault:
        raise ManifestInvalid(
            f"{folder} has no manifest that can be read: {fault.strerror}: {fault.filename}. Likely cause: nothing was "
            "prewarmed there, or a prewarm was killed. Next step: `nox -s prewarm -- --target TARGET --root ROOT`, "
            "which continues with what is missing."
        ) from fault
    return parse_manifest(text, line, str(folder))


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
    "working folder": ("cuda",),  # of NVRTC (jit/start.py)
}
# TorchInductor compiles C++ only where it has no GPU, for what the compiler and the CPU can. Its key holds the command
# line, and with it the folders of headers: another environment of the same versions compiles anew (torch 2.13).
_KEYS_OF_C: Final = ("c++", "c++ headers", "isa")
_MINOR: Final = frozenset({"python"})  # of these the patch release is in no key


def compare_stack(manifest: Manifest, stack: StackSeen, architecture: str, mode: str) -> tuple[StackDifference, ...]:
    """In what a cache and a stack differ, as far as a key of a library that has files there would miss.

    Args:
        manifest: of the cache.
        stack: of here, as a process in it told.
        architecture, mode: that are asked for here.
    """
    there = {size.library for size in manifest.sizes}
    return tuple(
        StackDifference(what=what, recorded=recorded, observed=observed, matters=", ".join(sorted(there & set(whose))))
        for what, recorded, observed, whose in _pair(manifest, stack, architecture, mode)
        if recorded != observed and (whose is _ALL or there & set(whose))
    )


def _pair(
    manifest: Manifest, stack: StackSeen, architecture: str, mode: str
) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """What is compared: name, recorded, observed, and the caches that it matters to."""
    made = manifest.stack
    yield "architecture", manifest.architecture, architecture, _ALL
    yield "machine", made.machine, stack.machine, _ALL
    for name, whose in _KEYS.items():
        yield name, _version(made.versions, name), _version(stack.versions, name), whose
    whose = ("inductor", "torch_extensions") if manifest.architecture == CPU else ("torch_extensions",)
    for name in _KEYS_OF_C:
        yield name, _version(made.versions, name), _version(stack.versions, name), whose
    yield "compiler mode", manifest.mode, mode, ("deep_gemm",)
    yield "compiler", made.compiler.version or "none", stack.compiler.version or "none", ("deep_gemm",)
    yield "include path", ":".join(made.include_paths), ":".join(stack.include_paths), ("deep_gemm",)


def _version(versions: Mapping[str, Any], name: str) -> str:
    text = str(versions.get(name) or "not installed")
    return ".".join(text.split(".")[:2]) if name in _MINOR else text


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
