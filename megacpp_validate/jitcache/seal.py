"""Sealing: files that nobody writes any more, under a manifest by whose hash they are named.

What is sealed is never a library's cache itself where it must stay as it is: libraries write on a hit too (locks), and
on a miss. They get a working copy (`working`), or, in an image, folders that take new files beside the sealed ones.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .files import Seen, drop_passing, hash_files, list_files
from .layout import LIBRARIES, LOCKS, MANIFEST, MANIFEST_HASH
from .manifest import Manifest, read_manifest
from .place import OtherArchitecture

_FILE_MODE: Final = 0o444
_FOLDER_MODE: Final = 0o755
# Anybody may add a file, and nobody may replace one of somebody else's (the sticky bit).
_SHARED_FOLDER_MODE: Final = 0o1777
_OPEN_FILE_MODE: Final = 0o644
_SHOWN: Final = 8


class CacheDamaged(RuntimeError):
    """A sealed cache whose files are not those of its manifest; the text names them."""


@dataclass(frozen=True)
class Checked:
    """A sealed cache whose every file has the hash that its manifest says.

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
    """Make the files read-only, and say by which hash they are named.

    Args:
        folder: ROOT/ARCH, with its manifest.
        shared: any user may add files beside them, as in an image, where misses are written by whoever runs it.

    Raises:
        ManifestInvalid: there is none.
        CacheDamaged: the files are not those of the manifest.
        OSError: somebody else owns it.
    """
    checked = check_sealed(folder)
    if checked.extra:
        raise CacheDamaged(
            f"{folder} has {len(checked.extra)} file(s) that its manifest does not have: {_listed(checked.extra)}. "
            "Likely cause: something compiled there after the prewarm. Next step: `nox -s prewarm` on it again, which "
            "takes them up, and seal then."
        )
    drop_passing(folder)
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


def unseal(folder: Path) -> Manifest:
    """Let a prewarm go on there: the manifest goes, and is returned.

    Raises:
        ManifestInvalid: it has none.
        OSError: somebody else owns it.
    """
    manifest, _ = read_manifest(folder)
    (folder / MANIFEST_HASH).unlink()
    for place in _folders(folder):
        place.chmod(_FOLDER_MODE)
    for file in manifest.files:
        if (folder / file.path).is_file():
            (folder / file.path).chmod(_OPEN_FILE_MODE)
    (folder / MANIFEST).unlink()
    return manifest


def check_sealed(folder: Path) -> Checked:
    """Read every file, and hold it to the manifest.

    Raises:
        ManifestInvalid: there is none that can be believed.
        OtherArchitecture: the folder has the name of another one.
        CacheDamaged: a file is gone, or is another one; each is named.
        NoPlainFile: a link lies there.
        OSError: a file cannot be read.
    """
    manifest, digest = read_manifest(folder)
    if manifest.architecture != folder.name:
        raise OtherArchitecture(
            f"{folder} holds caches of the architecture {manifest.architecture}. Likely cause: a folder was copied "
            "under another name; whoever looks there for its own architecture would take kernels that crash. Next "
            f"step: rename it to {manifest.architecture}."
        )
    there = {seen.path: seen for seen in list_files(folder)}
    if wrong := list(_find_wrong(folder, manifest, there)):
        raise say_changed(folder, *wrong)
    known = {file.path for file in manifest.files}
    return Checked(manifest, digest, tuple(sorted(there.keys() - known)))


def say_changed(folder: Path, *wrong: str) -> CacheDamaged:
    """That files of a sealed cache are not those of its manifest; each is named."""
    return CacheDamaged(
        f"{folder} is not what its manifest says: {_listed(wrong)}. Likely cause: a damaged disk or copy, or "
        "something wrote there after it was sealed. Next step: import it again from where it was exported, or "
        "prewarm again; it is no evidence of anything now."
    )


def _find_wrong(folder: Path, manifest: Manifest, there: dict[str, Seen]) -> Iterator[str]:
    same = []
    for file in manifest.files:
        seen = there.get(file.path)
        if seen is None:
            yield f"{file.path} is gone"
        elif seen.bytes != file.bytes:
            yield f"{file.path} has {seen.bytes} bytes instead of {file.bytes}"
        else:
            same.append(file)
    found = hash_files(folder, (file.path for file in same))
    for file in same:
        if found[file.path] != file.sha256:
            yield f"{file.path} has another content (sha256 {found[file.path][:12]} instead of {file.sha256[:12]})"


def _folders(folder: Path) -> Iterator[Path]:
    """ROOT/ARCH, and every folder of its caches and locks; not what a prewarm keeps there for itself."""
    yield folder
    for name in (LOCKS, *LIBRARIES):
        yield from (Path(place) for place, _, _ in os.walk(folder / name))


def _listed(names: tuple[str, ...]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
