"""Sealed caches: files that nobody writes any more, named by the hash of their manifest; and working copies of them.

Libraries write where they only read: a lock beside each kernel (FlashAttention 4, TorchInductor), and what was missing.
So a process gets a copy of a sealed cache, or, in an image, folders that take new files beside the sealed ones. Copied,
not linked: through a hard link a library that writes in place would change what is sealed.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import WrongArguments
from ..evidence.whole_file import write_whole
from .layout import DRAFT, LIBRARIES, LOCKS, MANIFEST, MANIFEST_HASH, STATE, arch_folder
from .manifest import (
    CacheChanged,
    FileSeen,
    Listed,
    Manifest,
    hash_files,
    list_files,
    manifest_text,
    read_manifest,
    remove_temporary,
)

_FILE_MODE: Final = 0o444
_FOLDER_MODE: Final = 0o755
# Anybody may add a file, and nobody may replace one of somebody else's (the sticky bit).
_SHARED_FOLDER_MODE: Final = 0o1777
_OPEN_FILE_MODE: Final = 0o644
_SHOWN: Final = 8
_GROUP: Final = "__grp__"  # Triton's list of the files of one kernel, by absolute path (3.7.1, runtime/cache.py)
_CHILDREN: Final = "child_paths"
_COPIERS: Final = 4


@dataclass(frozen=True)
class Checked:
    """A cache whose every file has the hash that its manifest says.

    Attributes:
        digest: of the manifest.
        extra: files that appeared since, which the manifest does not have.
    """

    manifest: Manifest
    digest: str
    extra: tuple[str, ...]


def is_sealed(folder: Path) -> bool:
    """Whether ROOT/ARCH has a manifest that is read-only: an unfinished prewarm has one that is not, or none."""
    try:
        mode = (folder / MANIFEST_HASH).stat().st_mode
    except OSError:
        return False
    return not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)


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
        raise CacheChanged(
            f"{folder} has {len(checked.extra)} file(s) that its manifest does not have: {_list(checked.extra)}. "
            "Likely cause: something compiled there after the prewarm. Next step: `nox -s prewarm` on it again, which "
            "takes them up, and seal then."
        )
    remove_temporary(folder)
    for file in checked.manifest.files:
        (folder / file.path).chmod(_FILE_MODE)
    if shared:  # made now: what makes them later is one user of many
        for name in (LOCKS, *LIBRARIES, f"inductor/{LOCKS}"):
            (folder / name).mkdir(exist_ok=True)
    for place in _folders(folder):
        place.chmod(_SHARED_FOLDER_MODE if shared else _FOLDER_MODE)
    (folder / MANIFEST).chmod(_FILE_MODE)
    (folder / MANIFEST_HASH).chmod(_FILE_MODE)  # last: what is sealed is sealed whole
    return checked.digest


def unseal(folder: Path) -> None:
    """Let a prewarm go on there: the manifest becomes its draft.

    What is damaged is not opened: it would be sealed again as if it were whole.

    Raises:
        ManifestInvalid: it has none.
        CacheChanged: the files are not those of the manifest.
        WrongArguments: somebody else owns it, as the cache of an image.
    """
    manifest = check_sealed(folder).manifest
    try:
        (folder / STATE).mkdir(exist_ok=True)
        write_whole(folder / DRAFT, manifest_text(manifest))
        (folder / MANIFEST_HASH).unlink()
        for place in _folders(folder):
            place.chmod(_FOLDER_MODE)
        for file in manifest.files:
            (folder / file.path).chmod(_OPEN_FILE_MODE)
        (folder / MANIFEST).unlink()
    except PermissionError as fault:
        raise WrongArguments(
            f"{folder} was sealed by another user: {fault.strerror}: {fault.filename}. Likely cause: it is the cache "
            f"of an image. Next step: `nox -s jit_cache -- open --root {folder.parent} --work FOLDER`, and prewarm in "
            "FOLDER."
        ) from fault


def check_sealed(folder: Path) -> Checked:
    """Read every file, and compare it with the manifest.

    Raises:
        ManifestInvalid: there is none that can be believed.
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
    there = check_files(folder, manifest)
    known = {file.path for file in manifest.files}
    return Checked(manifest, digest, tuple(sorted(there.keys() - known)))


def check_files(folder: Path, manifest: Manifest) -> dict[str, Listed]:
    """The files of a folder, once all those of a manifest are there with their hashes. Raises as `check_sealed`."""
    there = {listed.path: listed for listed in list_files(folder)}
    same = [file for file in manifest.files if file.path in there and there[file.path].bytes == file.bytes]
    hashes = hash_files(folder, (file.path for file in same))
    wrong = [
        f"{file.path} is gone" if file.path not in there
        else f"{file.path} has {there[file.path].bytes} bytes instead of {file.bytes}" if file.path not in hashes
        else f"{file.path} has another content (sha256 {hashes[file.path][:12]} instead of {file.sha256[:12]})"
        for file in manifest.files
        if hashes.get(file.path) != file.sha256
    ]  # fmt: skip
    if wrong:
        raise CacheChanged(
            f"{folder} is not what its manifest says: {_list(wrong)}. Likely cause: a damaged disk or copy, or "
            "something wrote there after it was sealed. Next step: import it again from where it was exported, or "
            "prewarm again; it is no evidence of anything now."
        )
    return there


def _folders(folder: Path) -> Iterator[Path]:
    """ROOT/ARCH, and every folder of its caches and locks; not what a prewarm keeps there for itself."""
    yield folder
    for name in (LOCKS, *LIBRARIES):
        yield from (Path(place) for place, _, _ in os.walk(folder / name))


def _list(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- working copies --------------------------------------------------------------------------------------------------


def open_working(sealed: Path, manifest: Manifest, work: Path) -> Path:
    """Copy ROOT/ARCH to WORK/ARCH, every file of the manifest and nothing else.

    Args:
        sealed: ROOT/ARCH, which was checked.
        manifest: of it.
        work: another root; WORK/ARCH must not be there.

    Raises:
        WrongArguments: WORK/ARCH is there.
        OSError: it cannot be written, or the disk is full: what was written is removed then.
    """
    folder = arch_folder(work, manifest.architecture)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as fault:
        raise WrongArguments(
            f"{folder} exists already. Likely cause: an earlier working copy, which may hold what was missing. Next "
            "step: use it as it is, give another --work, or remove it."
        ) from fault
    try:
        copy_files(sealed, folder, manifest.files)
        for name in LIBRARIES:
            (folder / name).mkdir(exist_ok=True)
        for file in manifest.files if str(folder) != manifest.folder else ():
            if _is_group(file):
                _relocate(folder / file.path, manifest.folder, file.mtime_ns, str(folder))
        (folder / STATE).mkdir()
        write_whole(folder / DRAFT, manifest_text(manifest))  # a prewarm that goes on here knows what is there
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def copy_files(source: Path, target: Path, files: Iterable[FileSeen]) -> None:
    """Copy files of a manifest from folder to folder, with their times. Raises `OSError`."""
    rows = tuple(files)
    for parent in sorted({(target / file.path).parent for file in rows}):
        parent.mkdir(parents=True, exist_ok=True)

    def copy(file: FileSeen) -> None:
        place = target / file.path
        shutil.copyfile(source / file.path, place, follow_symlinks=False)  # in the kernel, where it can
        place.chmod(_OPEN_FILE_MODE)
        os.utime(place, ns=(file.mtime_ns, file.mtime_ns))

    with ThreadPoolExecutor(_COPIERS) as pool:
        list(pool.map(copy, rows))


def is_at_home(folder: Path, manifest: Manifest) -> bool:
    """Whether the libraries find everything in this very folder, without a working copy."""
    return str(folder) == manifest.folder or not any(_is_group(file) for file in manifest.files)


def _is_group(file: FileSeen) -> bool:
    return file.names_root and file.path.rpartition("/")[2].startswith(_GROUP)


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
