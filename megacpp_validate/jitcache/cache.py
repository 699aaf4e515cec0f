"""Sealed caches: checked, sealed, opened as a working copy, exported and imported.

A sealed cache is files that nobody writes any more, named by the hash of their manifest. Libraries write where they
only read: a lock beside each kernel (FlashAttention 4, TorchInductor), and what was missing. So a process gets a copy
of a sealed cache, or, in an image, folders that take new files beside the sealed ones. Copied, not linked: through a
hard link a library that writes in place would change what is sealed.

An archive holds ARCH/manifest.json, ARCH/manifest.sha256, then the files of the manifest in its order, and nothing
else: the same cache gives the same bytes. On import everything is unpacked aside, each file compared with its hash, and
renamed when all are right.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from .. import TOOL
from ..errors import EvidenceMissing, Exit, ToolError, WrongArguments
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen
from . import layout
from .manifest import FileSeen, JitCacheSize, Manifest, manifest_text, parse_manifest, read_manifest

_FILE_MODE: Final = 0o444
_FOLDER_MODE: Final = 0o755
# Anybody may add a file, and nobody may replace one of somebody else's (the sticky bit).
_SHARED_FOLDER_MODE: Final = 0o1777
_OPEN_FILE_MODE: Final = 0o644
_SHOWN: Final = 8
_GROUP: Final = "__grp__"  # Triton's list of the files of one kernel, by absolute path (3.7.1, runtime/cache.py)
_CHILDREN: Final = "child_paths"
_COPIERS: Final = 4
_GZIP_LEVEL: Final = 1  # kernels shrink to about a half at any level
_COPY: Final = "Nothing was imported. Next step: copy or export it again"


class JitCacheResult(Frozen):
    """What was done with a sealed cache.

    Attributes:
        deed: "check", "seal", "export", "import", "open".
        folder: ROOT/ARCH that it was done to, or that it made.
        manifest: hash of the manifest.
        stack: versions that the cache is for.
        missing: tasks that are not in it.
        extra: files that appeared since it was sealed.
        archive, archive_hash: of an export.
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
    archive_hash: str = ""
    variables: dict[str, str] = Field(default_factory=dict)
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def exit(self) -> Exit:
        """Open: what is wrong with a cache is an error."""
        return Exit.OPEN


@dataclass(frozen=True)
class CacheOptions:
    """What to do, and with what.

    Attributes:
        place: archive to export to, or to import.
        arch: of the cache; the only one below the root where it is empty.
        work: root of the working copy of `open`.
        shared: of `seal`: any user may add files beside the sealed ones.
    """

    action: Literal["check", "seal", "export", "import", "open"]
    place: Path | None = None
    arch: str = ""
    work: Path | None = None
    shared: bool = False


def run_cache(root: Path, options: CacheOptions) -> JitCacheResult:
    """One action on a cache below a root.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full, or a folder cannot be written.
    """
    started, action = time.monotonic(), options.action
    if action in ("export", "import") and options.place is None:
        raise WrongArguments("no archive is named. Next step: name one such as jit.tar.gz.")
    if action == "open" and options.work is None:
        raise WrongArguments("no folder is named. Next step: name a folder that you can write with --work.")
    if action == "import":
        result = import_cache(Path(options.place or "").absolute(), root)
    else:
        folder = _find_folder(root, options.arch)
        if action == "seal":
            seal(folder, shared=options.shared)
        if action == "export":
            result = export_cache(folder, Path(options.place or "").absolute())
        elif action == "open":
            result = open_working(folder, check_sealed(folder), Path(options.work or "").absolute())
        else:
            result = _describe(action, folder, check_sealed(folder), sealed=is_sealed(folder))
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 2)})


def _find_folder(root: Path, arch: str) -> Path:
    """ROOT/ARCH; the only one with a manifest where no architecture is named."""
    if arch:
        return layout.arch_folder(root, arch)
    found = sorted(path.parent for path in root.glob(f"*/{layout.MANIFEST}"))
    if len(found) == 1:
        return found[0]
    there = ", ".join(path.name for path in found) or "nothing was prewarmed there, or a prewarm did not end"
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
    """Whether ROOT/ARCH has a manifest that is read-only: an unfinished prewarm has one that is not, or none."""
    with suppress(OSError):
        return not (folder / layout.MANIFEST_HASH).stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    return False


def check_sealed(folder: Path) -> Checked:
    """Read every file, and compare it with the manifest.

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
    checked = check_sealed(folder)
    if checked.extra:
        raise layout.CacheChanged(
            f"{folder} has {len(checked.extra)} files that its manifest does not have: {checked.extra[:_SHOWN]}. "
            "Likely cause: something compiled there after the prewarm. Next step: `nox -s prewarm` on it again, which "
            "takes them up, and seal then."
        )
    layout.remove_temporary(folder)
    folders = (layout.LOCKS, *layout.LIBRARIES)
    for name in (
        (*folders, f"inductor/{layout.LOCKS}") if shared else ()
    ):  # now: what makes them later is one user of many
        (folder / name).mkdir(exist_ok=True)
    for place in (folder, *(Path(place) for name in folders for place, _, _ in os.walk(folder / name))):
        place.chmod(_SHARED_FOLDER_MODE if shared else _FOLDER_MODE)
    for file in checked.manifest.files:
        (folder / file.path).chmod(_FILE_MODE)
    (folder / layout.MANIFEST).chmod(_FILE_MODE)
    (folder / layout.MANIFEST_HASH).chmod(_FILE_MODE)  # last: what is sealed is sealed whole
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
        _copy_files(sealed, folder, manifest.files)
        for name in layout.LIBRARIES:
            (folder / name).mkdir(exist_ok=True)
        for file in manifest.files:
            if file.names_root and file.path.rpartition("/")[2].startswith(_GROUP):
                _relocate(folder / file.path, manifest.folder, file.mtime_ns, str(folder))
        write_whole(folder / layout.DRAFT, manifest_text(manifest))  # a prewarm that goes on here knows what is there
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    variables = layout.cache_variables(work, folder.name, nvrtc=manifest.mode == layout.NVRTC)
    return _describe("open", folder, checked, variables=variables)


def _copy_files(source: Path, target: Path, files: Iterable[FileSeen]) -> None:
    """Copy files of a manifest from folder to folder, with their times."""

    def copy(file: FileSeen) -> None:
        place = target / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file.path, place, follow_symlinks=False)  # in the kernel, where it can
        place.chmod(_OPEN_FILE_MODE)
        os.utime(place, ns=(file.mtime_ns, file.mtime_ns))

    with ThreadPoolExecutor(_COPIERS) as pool:
        list(pool.map(copy, files))


def _relocate(place: Path, old: str, mtime_ns: int, new: str) -> None:
    """Let a group of Triton's name the folder that it lies in now; other paths stay.

    Triton looks a group up by the absolute paths that stand in it, and passes over a file that is not at its path.
    """
    prefix = f"{old.rstrip('/')}/"
    data: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    moved = {
        name: f"{new}/{path.removeprefix(prefix)}" if path.startswith(prefix) else path
        for name, path in data[_CHILDREN].items()
    }
    write_whole(place, json.dumps({**data, _CHILDREN: moved}))
    os.utime(place, ns=(mtime_ns, mtime_ns))


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
        WrongArguments: it is not sealed.
        CacheChanged: the cache is not what its manifest says.
        OSError: the target cannot be written or its disk is full; what was written is removed.
    """
    if not is_sealed(folder):
        raise WrongArguments(
            f"{folder} is not sealed, so that an export could hold half of it. Next step: `nox -s jit_cache -- seal`, "
            "or `nox -s prewarm` to its end."
        )
    checked = check_sealed(folder)
    times = {file.path: file.mtime_ns / 1e9 for file in checked.manifest.files}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as aside:
        part = Path(aside, "archive")
        with part.open("xb") as file:
            zipped = gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) if target.name.endswith("gz") else None
            with zipped or nullcontext(file) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
                for path in (layout.MANIFEST, layout.MANIFEST_HASH, *times):
                    with (folder / path).open("rb") as reader:
                        info = tarfile.TarInfo(f"{folder.name}/{path}")  # of root's, and read-only
                        info.size, info.mode, info.mtime = (folder / path).stat().st_size, 0o444, times.get(path, 0)
                        archive.addfile(info, reader)
        digest = layout.hash_files(Path(aside), [part.name])[part.name]
        part.replace(target)
    return _describe("export", folder, checked, archive=str(target), archive_hash=f"sha256:{digest}")


def import_cache(source: Path, root: Path) -> JitCacheResult:
    """Put an exported cache below a root, every hash right, under its own architecture; sealed.

    Whether it fits the stack is for `jit_verify` to judge.

    Args:
        source: an archive.
        root: below which ARCH is made.

    Raises:
        WrongArguments: no archive of a cache, a member that has no place in it, or another cache is there.
        CacheChanged: a file whose hash is wrong, or that is missing; named.
        ManifestInvalid: the manifest is invalid.
        OSError: the root cannot be written, or its disk is full; what was written is removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=root) as aside:
        try:
            with tarfile.open(source, "r:*") as archive:
                manifest, digest = _unpack(archive, Path(aside))
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError) as fault:
            raise WrongArguments(
                f"{source} cannot be unpacked: {fault}. Likely cause: it is missing, was cut short or damaged. {_COPY}."
            ) from fault
        new, place = Path(aside, manifest.architecture), layout.arch_folder(root, manifest.architecture)
        for file in manifest.files:
            with suppress(FileNotFoundError):  # `seal` names it
                os.utime(new / file.path, ns=(file.mtime_ns, file.mtime_ns))
        seal(new)
        if not place.exists() or not any(place.iterdir()):
            new.rename(place)
        elif not _is_same(place, digest):
            raise WrongArguments(
                f"{place} holds another cache (or a damaged one, or a prewarm that is not sealed), and not {digest}. "
                "Next step: import it into another --root, or remove that folder."
            )
    return _describe("import", place, Checked(manifest, digest))


def _is_same(place: Path, digest: str) -> bool:
    with suppress(ToolError):
        return is_sealed(place) and check_sealed(place).digest == digest
    return False


def _unpack(archive: tarfile.TarFile, folder: Path) -> tuple[Manifest, str]:
    """Unpack an archive of a cache, whose first two members are the manifest and its hash."""
    heads = list[bytes]()
    for name in (layout.MANIFEST, layout.MANIFEST_HASH):
        member = archive.next()
        reader = archive.extractfile(member) if member is not None and member.isreg() else None
        if reader is None or member is None or Path(member.name).name != name:
            raise tarfile.ReadError(f"it does not begin with {layout.MANIFEST} and {layout.MANIFEST_HASH}")
        heads.append(reader.read())
    manifest, digest = parse_manifest(heads[0], heads[1], "the archive")
    arch = manifest.architecture
    expected = {
        f"{arch}/{path}" for path in (layout.MANIFEST, layout.MANIFEST_HASH, *(file.path for file in manifest.files))
    }
    for member in archive.getmembers():
        if not member.isreg() or member.name not in expected:
            raise WrongArguments(
                f"the archive has the member {member.name!r}, which its manifest does not have as a plain file. "
                f"Likely cause: it was made by something else, or changed. {_COPY}."
            )
        member.mode = _OPEN_FILE_MODE
    archive.extractall(folder, filter="data")
    return manifest, digest
