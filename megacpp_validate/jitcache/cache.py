"""Sealed caches: checked, sealed, opened as a working copy, exported and imported.

A sealed cache is files that nobody writes any more, named by the hash of their manifest. Libraries write where they
only read: a lock beside each kernel (FlashAttention 4, TorchInductor), and what was missing. So a process gets a copy
of a sealed cache, or, in an image, folders that take new files beside the sealed ones. Copied, not linked: through a
hard link a library that writes in place would change what is sealed.

A cache is sealed where `manifest.sha256` lies beside its manifest. An archive holds ARCH/manifest.json,
ARCH/manifest.sha256, then the files of the manifest in its order, and nothing else. An import unpacks
everything aside, compares each file with its hash, and renames the folder when all are right.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from .. import TOOL
from ..errors import EvidenceMissing, Exit, WrongArguments
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen
from . import layout
from .manifest import (
    JitCacheSize,
    Manifest,
    ManifestInvalid,
    describe_files,
    hash_line,
    read_manifest,
    write_manifest,
)

_FILE_MODE: Final = 0o444
_FOLDER_MODE: Final = 0o755
# Anybody may add a file, and nobody may replace one of somebody else's (the sticky bit).
_SHARED_FOLDER_MODE: Final = 0o1777
_SHOWN: Final = 8
_GROUP: Final = "__grp__"  # Triton's list of the files of one kernel, by absolute path (3.7.1, runtime/cache.py)
_COPY: Final = "Nothing was imported. Next step: copy or export it again"


Action = Literal["check", "seal", "export", "import", "open"]


class JitCacheResult(Frozen):
    """What was done with a sealed cache.

    Attributes:
        deed: "check", "seal", "export", "import", "open".
        folder: ROOT/ARCH that it was done to, or that it made.
        manifest: hash of the manifest.
        stack: versions that the cache is for.
        missing: tasks that are not in it.
        extra: files that appeared since it was sealed.
        archive: of an export.
        variables: that put every cache there, of "open".
    """

    schema_id: Literal["megacpp-validate/jit-cache/2"] = "megacpp-validate/jit-cache/2"
    tool: str
    deed: str
    folder: str
    architecture: str
    manifest: str = ""
    stack: dict[str, str] = Field(default_factory=dict)
    caches: tuple[JitCacheSize, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    sealed: bool = True
    archive: str = ""
    variables: dict[str, str] = Field(default_factory=dict)
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def exit(self) -> Exit:
        """Open: what is wrong with a cache is an error."""
        return Exit.OPEN


def run_cache(
    root: Path, action: Action, place: Path | None = None, *, arch: str = "", work: Path | None = None,
    shared: bool = False,
) -> JitCacheResult:  # fmt: skip
    """One action on a cache below a root.

    Args:
        place: archive to export to, or to import.
        arch: of the cache; the only one below the root where it is empty.
        work: root of the working copy of `open`.
        shared: of `seal`: any user may add files beside the sealed ones.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full, or a folder cannot be written.
    """
    started = time.monotonic()
    if (action in ("export", "import") and place is None) or (action == "open" and work is None):
        raise WrongArguments("no archive, or no folder, is named. Next step: name jit.tar.gz, or --work FOLDER.")
    folder = root if action == "import" else _find_folder(root, arch)
    if action == "import":
        result = import_cache(Path(place or "").absolute(), root)
    elif action == "export":
        result = export_cache(folder, Path(place or "").absolute())
    elif action == "open":
        result = open_working(folder, check_sealed(folder), Path(work or "").absolute())
    else:
        if action == "seal":
            seal(folder, shared=shared)
        result = _describe(action, folder, check_files(folder), sealed=is_sealed(folder))
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


# --- checked and sealed -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """A cache whose every file has the hash of its manifest.

    Attributes:
        digest: of the manifest.
        extra: files that appeared since, which the manifest does not have.
    """

    manifest: Manifest
    digest: str
    extra: tuple[str, ...] = ()


def is_sealed(folder: Path) -> bool:
    """Whether the hash of its manifest lies in ROOT/ARCH, as nothing but `seal` and a prewarm put it there."""
    return (folder / layout.MANIFEST_HASH).exists()


def check_sealed(folder: Path) -> Checked:
    """Read every file of a sealed cache, and compare it with the manifest.

    Raises:
        ManifestInvalid: the cache is not sealed.
        ToolError, OSError: as `check_files`.
    """
    if not is_sealed(folder):
        raise ManifestInvalid(
            f"{folder} is not sealed, so that its contents are not known. Likely cause: a prewarm with --no-seal or "
            "without an end. Next step: `nox -s prewarm` to its end, or `nox -s jit_cache -- seal`, which compares "
            "every file with its hash."
        )
    return check_files(folder)


def check_files(folder: Path) -> Checked:
    """Read every file of a cache, and compare it with the manifest.

    Raises:
        ManifestInvalid: there is no valid manifest.
        WrongArguments: the folder has the name of another architecture.
        CacheChanged: a file is gone, or is another one, or a link; each is named.
        OSError: a file cannot be read.
    """
    manifest, digest = read_manifest(folder)
    if manifest.architecture != folder.name:
        raise WrongArguments(
            f"{folder} holds caches of the architecture {manifest.architecture}. Likely cause: a folder was copied "
            "under another name; processes of that architecture would load kernels that crash. Next step: rename it "
            f"to {manifest.architecture}."
        )
    there = {listed.path for listed in layout.list_files(folder)}
    hashes = layout.hash_files(folder, [file.path for file in manifest.files if file.path in there])
    wrong = [
        f"{file.path} {'has another content' if file.path in there else 'is gone'}"
        for file in manifest.files
        if hashes.get(file.path) != file.sha256
    ]
    if wrong:
        raise layout.CacheChanged(
            f"{folder} is not what its manifest says: {', '.join(wrong[:_SHOWN])} ({len(wrong)} in all). Likely cause: "
            "a damaged disk or copy, or something wrote there after it was sealed. Next step: import it again from "
            "where it was exported, or prewarm again."
        )
    return Checked(manifest, digest, tuple(sorted(there - {file.path for file in manifest.files})))


def seal(folder: Path, *, shared: bool = False) -> str:
    """Make the files read-only, and return the hash by which they are named.

    Args:
        folder: ROOT/ARCH, with its manifest.
        shared: any user may add files beside them, as in an image, where misses are written by whoever runs it.

    Raises:
        ManifestInvalid: there is none.
        CacheChanged: the files are not those of the manifest.
        OSError: somebody else owns it.
    """
    checked = check_files(folder)
    if checked.extra:
        raise layout.CacheChanged(
            f"{folder} has {len(checked.extra)} files that its manifest does not have: {checked.extra[:_SHOWN]}. "
            "Likely cause: something compiled there after the prewarm. Next step: `nox -s prewarm` on it again, which "
            "removes them."
        )
    layout.remove_temporary(folder)
    folders = (layout.LOCKS, *layout.LIBRARIES)
    if shared:  # made now: what makes them later is one user of many
        for name in (*folders, f"inductor/{layout.LOCKS}"):
            (folder / name).mkdir(exist_ok=True)
    for place in (folder, *(Path(place) for name in folders for place, _, _ in os.walk(folder / name))):
        place.chmod(_SHARED_FOLDER_MODE if shared else _FOLDER_MODE)
    # The hash comes last: what is sealed is sealed whole.
    write_whole(folder / layout.MANIFEST_HASH, hash_line((folder / layout.MANIFEST).read_bytes()))
    for path in (*(file.path for file in checked.manifest.files), layout.MANIFEST, layout.MANIFEST_HASH):
        (folder / path).chmod(_FILE_MODE)
    return checked.digest


# --- working copies ---------------------------------------------------------------------------------------------------


def open_working(sealed: Path, checked: Checked, work: Path) -> JitCacheResult:
    """Copy ROOT/ARCH to WORK/ARCH, every file of the manifest and nothing else, and name the variables of the copy.

    Args:
        sealed: ROOT/ARCH, which was checked.
        work: another root; WORK/ARCH must not be there.

    Raises:
        WrongArguments: WORK/ARCH is there.
        OSError: it cannot be written, or the disk is full: what was written is removed then.
    """
    manifest = checked.manifest
    folder = layout.arch_folder(work, manifest.architecture)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as fault:
        raise WrongArguments(
            f"{folder} exists already. Likely cause: an earlier working copy, which may hold what was missing. Next "
            "step: use it as it is, give another --work, or remove it."
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
        here = {"folder": str(folder), "files": describe_files(folder)}
        write_manifest(folder, manifest.model_copy(update=here))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    variables = layout.cache_variables(work, folder.name, nvrtc=manifest.mode == layout.NVRTC)
    return _describe("open", folder, checked, variables=variables)


def _relocate(place: Path, old: str, new: str) -> None:
    """Let a group of Triton's name the folder that it lies in now; other paths stay.

    Triton looks a group up by the absolute paths that stand in it, and passes over a file that is not at its path.
    """
    before, after = (json.dumps(f"{folder.rstrip('/')}/")[:-1] for folder in (old, new))
    place.write_text(place.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")


def _describe(action: str, folder: Path, checked: Checked, **more: Any) -> JitCacheResult:
    manifest = checked.manifest
    return JitCacheResult(
        tool=TOOL, deed=action, folder=str(folder), architecture=manifest.architecture, manifest=checked.digest,
        stack=manifest.stack.versions, caches=manifest.sizes, missing=manifest.missing, extra=checked.extra, **more,
    )  # fmt: skip


# --- carried ----------------------------------------------------------------------------------------------------------


def export_cache(folder: Path, target: Path) -> JitCacheResult:
    """Write a sealed cache to an archive: .tar, or .tar.gz.

    Args:
        folder: ROOT/ARCH, sealed.
        target: the archive.

    Raises:
        ManifestInvalid: it is not sealed.
        CacheChanged: the cache is not what its manifest says.
        OSError: the target cannot be written or its disk is full; what was written is removed.
    """
    checked = check_sealed(folder)
    times = {file.path: file.mtime_ns / 1e9 for file in checked.manifest.files}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as aside:
        part, zipped = Path(aside, "archive"), target.name.endswith("gz")
        with tarfile.open(part, "w:gz", compresslevel=1) if zipped else tarfile.open(part, "w") as archive:
            for path in (layout.MANIFEST, layout.MANIFEST_HASH, *times):
                with (folder / path).open("rb") as reader:
                    info = tarfile.TarInfo(f"{folder.name}/{path}")  # of root's, and read-only
                    info.size, info.mode, info.mtime = (folder / path).stat().st_size, 0o444, times.get(path, 0)
                    archive.addfile(info, reader)
        part.replace(target)
    return _describe("export", folder, checked, archive=str(target))


def import_cache(source: Path, root: Path) -> JitCacheResult:
    """Put an exported cache below a root, every hash right, under its own architecture; sealed.

    Whether it fits the stack is for `jit_verify` to judge.

    Args:
        source: an archive.
        root: below which ARCH is made.

    Raises:
        WrongArguments: no archive of a cache, a file that has no place in it, or another cache is there.
        CacheChanged: a file whose hash is wrong, or that is missing; named.
        ManifestInvalid: the manifest is invalid.
        OSError: the root cannot be written, or its disk is full; what was written is removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=root) as aside:
        try:
            new = _unpack(source, Path(aside))
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError) as fault:
            raise WrongArguments(
                f"{source} cannot be unpacked: {fault}. Likely cause: it is missing, was cut short or damaged. {_COPY}."
            ) from fault
        manifest, digest = read_manifest(new)
        listed = {layout.MANIFEST, layout.MANIFEST_HASH, *(file.path for file in manifest.files)}
        there = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()}
        if foreign := sorted(there - listed):
            raise WrongArguments(f"{source} has the file {foreign[0]!r}, which its manifest does not have. {_COPY}.")
        seal(new)
        for file in manifest.files:
            os.utime(new / file.path, ns=(file.mtime_ns, file.mtime_ns))
        place = layout.arch_folder(root, manifest.architecture)
        if not place.exists() or not any(place.iterdir()):
            new.rename(place)
        elif not is_sealed(place) or read_manifest(place)[1] != digest:
            raise WrongArguments(
                f"{place} holds another cache, and not {digest}. Next step: import it into another --root, or remove "
                "that folder."
            )
    return _describe("import", place, Checked(manifest, digest))


def _unpack(source: Path, folder: Path) -> Path:
    """Unpack an archive of plain files, none of which may lead out of it; the one folder ARCH that it holds."""
    with tarfile.open(source, "r:*") as archive:
        members = archive.getmembers()
        if links := [member.name for member in members if not member.isreg()]:
            raise tarfile.TarError(f"its member {links[0]!r} is no plain file")
        arches = sorted({member.name.partition("/")[0] for member in members})
        if len(arches) != 1 or f"{arches[0]}/{layout.MANIFEST_HASH}" not in archive.getnames():
            raise tarfile.TarError(f"it holds {arches}, and not one sealed cache with its {layout.MANIFEST_HASH}")
        archive.extractall(folder, filter="data")
    return folder / arches[0]
