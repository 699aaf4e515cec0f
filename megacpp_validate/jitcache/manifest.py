"""The manifest of one architecture's caches: what lies there, and which stack will find it.

A cache that does not fit is not an error for the libraries, which miss and compile. So the manifest records what their
keys hold, and a stack is compared with it before a training run waits for compilers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from ..errors import EvidenceMissing
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen
from . import layout

SCHEMA: Final = "megacpp-validate/jit-manifest/1"
_HEX: Final = r"^[0-9a-f]{64}$"


class ManifestInvalid(EvidenceMissing):
    """There is no manifest, or an invalid one."""


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


class JitCacheSize(Frozen):
    """Files and bytes of one library's cache."""

    library: str
    files: int
    bytes: int


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
    """What compiles DeepGEMM's kernels, whose key holds it: mode "nvcc" or "nvrtc", its path and version."""

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
        mode: "nvcc" or "nvrtc": what DeepGEMM compiled with.
        tasks: that are finished.
        missing: tasks of the target that are not, such as those that need a GPU.
        files: every file that counts, sorted.
        variables: of an earlier version.
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

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def sizes(self) -> tuple[JitCacheSize, ...]:
        """Files and bytes, a row a library that has any."""
        found: dict[str, list[int]] = defaultdict(list)
        for file in self.files:
            found[layout.library_of(file.path)].append(file.bytes)
        return tuple(
            JitCacheSize(library=name, files=len(sizes), bytes=sum(sizes)) for name, sizes in sorted(found.items())
        )


def describe_files(folder: Path) -> tuple[FileSeen, ...]:
    """Every file of ROOT/ARCH that counts, with its hash.

    Raises:
        CacheChanged: a link lies there.
        OSError: a file cannot be read.
    """
    listed = layout.list_files(folder)
    hashes = layout.hash_files(folder, (file.path for file in listed))

    def row(file: layout.Listed) -> FileSeen:
        names_root = file.path.endswith(".json") and str(folder).encode() in (folder / file.path).read_bytes()
        return FileSeen(**asdict(file), sha256=hashes[file.path], names_root=names_root)

    return tuple(map(row, listed))


def hash_line(text: bytes) -> str:
    """The file beside a manifest, as `sha256sum -c manifest.sha256` reads it."""
    return f"{sha256(text).hexdigest()}  {layout.MANIFEST}\n"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a ROOT/ARCH that is not sealed. Raises `OSError`."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False)
    write_whole(folder / layout.MANIFEST, text + "\n")


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest of ROOT/ARCH and its hash, as "sha256:...".

    Raises:
        CacheChanged: the cache is sealed, and the manifest is not the one whose hash lies beside it.
        ManifestInvalid: there is none, or it is damaged.
    """
    sealed = folder / layout.MANIFEST_HASH
    try:
        text = (folder / layout.MANIFEST).read_bytes()
        line = sealed.read_text(errors="replace") if sealed.exists() else hash_line(text)
    except OSError as fault:
        raise ManifestInvalid(
            f"{folder} has no manifest: {fault}. Likely cause: nothing was prewarmed there, or another user owns it. "
            "Next step: `nox -s prewarm`."
        ) from fault
    if line != hash_line(text):
        raise layout.CacheChanged(
            f"the manifest of {folder} does not hash to its {layout.MANIFEST_HASH}. Likely cause: it was edited. "
            "Next step: take the cache from where it was exported, or prewarm again."
        )
    try:
        return Manifest.model_validate_json(text), f"sha256:{sha256(text).hexdigest()}"
    except ValueError as fault:
        raise ManifestInvalid(
            f"the manifest of {folder} is invalid: {fault}. Likely cause: another version wrote it. Next step: prewarm "
            "again with this one."
        ) from fault


# --- does it fit a stack? --------------------------------------------------------------------------------------------

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
    of_c = ("inductor", "torch_extensions") if manifest.architecture == layout.CPU else ("torch_extensions",)
    rows = [
        ("architecture", manifest.architecture, architecture, layout.LIBRARIES),
        ("machine", made.machine, stack.machine, layout.LIBRARIES),
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
        if recorded != observed and (whose is layout.LIBRARIES or there & set(whose))
    )


def _version(stack: StackSeen, name: str) -> str:
    text = stack.versions.get(name) or "not installed"
    return ".".join(text.split(".")[:2]) if name == "python" else text  # its patch release is in no key
