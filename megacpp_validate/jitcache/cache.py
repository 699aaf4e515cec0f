"""Sealed caches: checked, opened as a working copy, exported and imported.

A sealed cache is files that nobody writes any more, named by the hash of their manifest. Libraries write where they
only read: a lock beside each kernel (FlashAttention 4, TorchInductor), and what was missing. So a process gets a copy
of a sealed cache, or, in an image, a folder of links to its files (images/entry.py). Copied, not linked hard: through a
hard link a library that writes in place would change what is sealed.

A cache is sealed where `manifest.sha256` lies beside its manifest. An archive holds ARCH/manifest.json,
ARCH/manifest.sha256 and the files of the manifest. An import unpacks everything aside, compares each file with its
hash, and renames the folder when all are right.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from ..errors import EvidenceMissing, WrongArguments
from ..evidence.receipt import write_whole
from ..evidence.values import Result
from . import layout
from .layout import CacheChanged, Manifest, ManifestInvalid

_FILE_MODE: Final = 0o444
_SHOWN: Final = 8
_GROUP: Final = "__grp__"  # Triton's list of the files of one kernel, by absolute path (3.7.1, runtime/cache.py)
_COPY: Final = "Nothing was imported. Next step: copy or export it again"

Action = Literal["check", "export", "import", "open"]


class JitCacheResult(Result):
    """What was done with a sealed cache.

    Attributes:
        deed: "check", "export", "import", "open".
        folder: ROOT/ARCH that was checked or exported, or that was made.
        manifest: hash of the manifest.
        stack: versions that the cache is for.
        caches: library -> bytes.
        missing: tasks that are not in it.
        archive: of an export.
        variables: that put every cache there, of "open".
    """

    schema_id: Literal["megacpp-validate/jit-cache/3"] = "megacpp-validate/jit-cache/3"
    deed: Action
    folder: str
    architecture: str
    manifest: str
    stack: dict[str, str] = Field(default_factory=dict)
    caches: dict[str, int] = Field(default_factory=dict)
    missing: tuple[str, ...] = ()
    archive: str = ""
    variables: dict[str, str] = Field(default_factory=dict)
    seconds: float = Field(default=0.0, ge=0.0)


def run_cache(
    root: Path, action: Action, place: Path | None = None, *, arch: str = "", work: Path | None = None
) -> JitCacheResult:
    """One action on a cache below a root.

    Args:
        place: archive to export to, or to import.
        arch: of the cache; the only one below the root where it is empty.
        work: root of the working copy of `open`.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full, or a folder cannot be written.
    """
    started = time.monotonic()
    if (action in ("export", "import") and place is None) or (action == "open" and work is None):
        raise WrongArguments("no archive, or no folder, is named. Next step: name jit.tar.gz, or --work FOLDER.")
    if action == "import":
        result = import_cache(Path(place or "").absolute(), root)
    elif action == "export":
        result = export_cache(_find_folder(root, arch), Path(place or "").absolute())
    elif action == "open":
        result = open_working(_find_folder(root, arch), Path(work or "").absolute())
    else:
        folder = _find_folder(root, arch)
        result = _describe(action, folder, *check_sealed(folder))
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 2)})


def _find_folder(root: Path, arch: str) -> Path:
    """ROOT/ARCH; the only one with a manifest where no architecture is named."""
    if arch:
        return layout.arch_folder(root, arch)
    found = sorted(path.parent for path in root.glob(f"*/{layout.MANIFEST}"))
    if len(found) == 1:
        return found[0]
    there = ", ".join(path.name for path in found) or "nothing was prewarmed there"
    raise (WrongArguments if found else EvidenceMissing)(
        f"{root} has {len(found)} caches with a manifest ({there}). Next step: name the root with --root, and one with "
        "--arch."
    )


def _describe(deed: Action, folder: Path, manifest: Manifest, digest: str, **more: Any) -> JitCacheResult:
    return JitCacheResult(
        deed=deed, folder=str(folder), architecture=manifest.architecture, manifest=digest,
        stack=manifest.stack.versions, caches=manifest.sizes, missing=manifest.missing, **more,
    )  # fmt: skip


# --- checked and sealed -----------------------------------------------------------------------------------------------


def is_sealed(folder: Path) -> bool:
    """Whether the hash of its manifest lies in ROOT/ARCH: `seal` puts it there last."""
    return (folder / layout.MANIFEST_HASH).exists()


def check_sealed(folder: Path) -> tuple[Manifest, str]:
    """Compare every file of a sealed cache with its manifest; the manifest and its hash.

    Files that the manifest does not have are ignored: nothing copies or exports them.

    Raises:
        ManifestInvalid: the cache is not sealed, or its manifest is invalid.
        CacheChanged: a file is gone, or is another one, or a link; each is named.
        OSError: a file cannot be read.
    """
    if not is_sealed(folder):
        raise ManifestInvalid(
            f"{folder} has no sealed cache. Likely cause: nothing was prewarmed there, or a prewarm did not end well. "
            "Next step: run `nox -s prewarm -- --target TARGET` to its end, or name another --root."
        )
    manifest, digest = layout.read_manifest(folder)
    there = layout.list_files(folder)
    hashes = layout.hash_files(folder, [file.path for file in manifest.files if file.path in there])
    wrong = [
        f"{file.path} {'has another content' if file.path in there else 'is gone'}"
        for file in manifest.files
        if hashes.get(file.path) != file.sha256
    ]
    if wrong:
        raise CacheChanged(
            f"{folder} is not what its manifest says: {', '.join(wrong[:_SHOWN])} ({len(wrong)} in all). Likely cause: "
            "a damaged disk or copy, or a process that wrote there after the seal. Next step: import the cache again "
            "from where it was exported, or prewarm again."
        )
    return manifest, digest


def seal(folder: Path) -> str:
    """Make the files of a manifest read-only, and write its hash last; the hash, as "sha256:...".

    Args:
        folder: ROOT/ARCH, whose manifest was written of what lies there now.

    Raises:
        ManifestInvalid: there is no valid manifest.
        OSError: somebody else owns it.
    """
    manifest, digest = layout.read_manifest(folder)
    layout.remove_temporary(folder)
    for path in (*(file.path for file in manifest.files), layout.MANIFEST):
        (folder / path).chmod(_FILE_MODE)
    write_whole(folder / layout.MANIFEST_HASH, layout.hash_line((folder / layout.MANIFEST).read_bytes()))
    (folder / layout.MANIFEST_HASH).chmod(_FILE_MODE)
    return digest


# --- working copies ---------------------------------------------------------------------------------------------------


def open_working(sealed: Path, work: Path) -> JitCacheResult:
    """Copy ROOT/ARCH to WORK/ARCH, every file of the manifest and nothing else, and name the variables of the copy.

    Args:
        sealed: ROOT/ARCH, which is checked first.
        work: another root; WORK/ARCH must not be there.

    Raises:
        WrongArguments: WORK/ARCH is there.
        ToolError: as `check_sealed`.
        OSError: it cannot be written, or the disk is full: what was written is removed then.
    """
    manifest, digest = check_sealed(sealed)
    folder = layout.arch_folder(work, manifest.architecture)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as fault:
        raise WrongArguments(
            f"{folder} exists already. Likely cause: an earlier working copy, which may hold what was missing. Next "
            "step: use that copy as it is, give another --work, or remove the copy."
        ) from fault
    try:
        for name in layout.LIBRARIES:
            (folder / name).mkdir(exist_ok=True)
        for file in manifest.files:
            place = folder / file.path
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(sealed / file.path, place)
            if file.names_root and place.name.startswith(_GROUP):
                _relocate(place, manifest.folder, str(folder))
            os.utime(place, ns=(file.mtime_ns, file.mtime_ns))
        # A prewarm that goes on here knows by this what is there.
        here = {"folder": str(folder), "files": layout.describe_files(folder)}
        layout.write_manifest(folder, manifest.model_copy(update=here))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    variables = layout.cache_variables(work, folder.name)
    return _describe("open", folder, manifest, digest, variables=variables)


def _relocate(place: Path, old: str, new: str) -> None:
    """Let a group of Triton's name the folder that it lies in now; other paths stay.

    Triton looks a group up by the absolute paths that stand in it, and passes over a file that is not at its path.
    """
    before, after = (json.dumps(f"{folder.rstrip('/')}/")[:-1] for folder in (old, new))
    place.write_text(place.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")


# --- carried ----------------------------------------------------------------------------------------------------------


def export_cache(folder: Path, target: Path) -> JitCacheResult:
    """Write a sealed cache to an archive: .tar, or .tar.gz.

    Args:
        folder: ROOT/ARCH, sealed.
        target: the archive.

    Raises:
        ToolError: as `check_sealed`.
        OSError: the target cannot be written or its disk is full; what was written is removed.
    """
    manifest, digest = check_sealed(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as aside:
        part = Path(aside, target.name)
        with tarfile.open(part, "w:gz" if target.suffix == ".gz" else "w") as archive:
            for path in (layout.MANIFEST, layout.MANIFEST_HASH, *(file.path for file in manifest.files)):
                archive.add(folder / path, f"{folder.name}/{path}")
        part.replace(target)
    return _describe("export", folder, manifest, digest, archive=str(target))


def import_cache(source: Path, root: Path) -> JitCacheResult:
    """Put an exported cache below a root, every hash right, under its own architecture; sealed.

    Whether it fits the stack is for `jit_verify` to judge.

    Args:
        source: an archive.
        root: below which ARCH is made.

    Raises:
        WrongArguments: no archive of a cache, a member that is not in its manifest, or a cache is there already.
        ToolError: as `check_sealed`.
        OSError: the root cannot be written, or its disk is full; what was written is removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=root) as aside:
        try:
            with tarfile.open(source, "r:*") as archive:
                names = archive.getnames()
                archive.extractall(aside, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError) as fault:
            raise WrongArguments(
                f"{source} cannot be unpacked: {fault}. Likely cause: a missing archive, or one cut short. {_COPY}."
            ) from fault
        new = Path(aside, names[0].partition("/")[0] if names else "")
        manifest, digest = check_sealed(new)
        listed = {layout.MANIFEST, layout.MANIFEST_HASH, *(file.path for file in manifest.files)}
        if foreign := sorted(set(names) - {f"{new.name}/{path}" for path in listed}):
            raise WrongArguments(f"{source} has the file {foreign[0]!r}, which its manifest does not have. {_COPY}.")
        seal(new)  # read-only again
        place = layout.arch_folder(root, manifest.architecture)
        try:
            new.rename(place)
        except OSError as fault:
            raise WrongArguments(
                f"{place} cannot be made: {fault.strerror}. Likely cause: a cache is there already. Next step: import "
                "into another --root, or remove that folder."
            ) from fault
    return _describe("import", place, manifest, digest)
