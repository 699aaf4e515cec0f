"""A sealed cache carried elsewhere: as one archive, such as a layer of an image, or as a folder of a volume.

An archive holds ARCH/manifest.json, ARCH/manifest.sha256, then the files of the manifest in its order, and nothing
else: the same cache gives the same bytes. On import everything is unpacked aside, each file held to its hash, and
renamed when all are right; so a cache is there whole, or not at all.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, Final

from .archive import SUFFIXES, TransferRefused, compressed, opened, plain_member, refuse_other_form, say_kind
from .aside import folder_aside
from .files import NoPlainFile, hash_file, is_passing, list_files
from .layout import MANIFEST, MANIFEST_HASH, arch_folder
from .manifest import FileSeen, Manifest, ManifestInvalid, hash_line, parse_manifest, read_manifest
from .place import OtherArchitecture
from .prewarm import without_prewarm
from .seal import CacheDamaged, check_sealed, is_sealed, say_changed, seal
from .working import copy_files

_CHUNK: Final = 2**20
_IMPORTED: Final = ".import-"
_MOST_MANIFEST: Final = 256 * 2**20  # bytes; of 100,000 files it takes 30 MB


@dataclass(frozen=True)
class Carried:
    """What was exported or imported.

    Attributes:
        place: the archive; of an import ROOT/ARCH.
        digest: of the manifest.
        archive: hash of the archive; empty for a folder.
        archive_bytes: its size.
        kept: an import found the same cache there already, and wrote nothing.
        extra: files beside the sealed ones, which an export leaves where they are.
    """

    place: Path
    manifest: Manifest
    digest: str
    archive: str = ""
    archive_bytes: int = 0
    kept: bool = False
    extra: tuple[str, ...] = ()


# --- out -------------------------------------------------------------------------------------------------------------


def export_cache(folder: Path, target: Path, *, prefix: str = "") -> Carried:
    """Write a sealed cache to an archive (.tar, .tar.gz, .tar.zst), or below a folder.

    Args:
        folder: ROOT/ARCH, sealed.
        target: the archive; a name without such an ending is a folder, which gets ARCH/.
        prefix: of the paths in the archive, such as "opt/megacpp/jit", for a layer that is laid over an image.

    Raises:
        TransferRefused: it is not sealed, or the target is there.
        CacheDamaged: the cache is not what its manifest says.
        OSError: the target cannot be written or its disk is full; what was written is removed.
    """
    if not is_sealed(folder):
        raise TransferRefused(
            f"{folder} is not sealed, so that what is exported could be half of it. Next step: "
            "`nox -s jit_cache -- seal`, or `nox -s prewarm` to its end."
        )
    checked = check_sealed(folder)
    if not target.name.endswith(SUFFIXES):
        refuse_other_form(target)
        place = _copy_out(folder, checked.manifest, target)
        return Carried(place, checked.manifest, checked.digest, extra=checked.extra)
    with folder_aside(target.parent, ".export-") as aside:
        part = aside / "archive"
        with compressed(part, target.name) as stream:
            _write_archive(stream, folder, checked.manifest, prefix)
        digest, size = hash_file(part), part.stat().st_size
        part.replace(target)
    return Carried(target, checked.manifest, checked.digest, f"sha256:{digest}", size, extra=checked.extra)


def _copy_out(folder: Path, manifest: Manifest, target: Path) -> Path:
    place = arch_folder(target, manifest.architecture)
    if place.exists():
        raise TransferRefused(f"{place} is there already. Next step: give another folder, or remove that one.")
    with folder_aside(target, _IMPORTED) as aside:
        new = aside / manifest.architecture
        new.mkdir()
        copy_files(folder, new, manifest.files)
        for name in (MANIFEST, MANIFEST_HASH):
            shutil.copyfile(folder / name, new / name)
        seal(new)
        new.rename(place)
    return place


def _write_archive(stream: IO[bytes], folder: Path, manifest: Manifest, prefix: str) -> None:
    start = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name in (MANIFEST, MANIFEST_HASH):
            text = (folder / name).read_bytes()
            archive.addfile(plain_member(f"{start}{manifest.architecture}/{name}", len(text)), BytesIO(text))
        for file in manifest.files:
            _add_file(archive, plain_member(f"{start}{manifest.architecture}/{file.path}", file.bytes), folder, file)


def _add_file(archive: tarfile.TarFile, info: tarfile.TarInfo, folder: Path, file: FileSeen) -> None:
    """Into an archive, held to its hash once more on the way: somebody may write there since it was checked."""
    wrong = "has another content now"
    try:
        with (folder / file.path).open("rb") as stream:
            reader = _Hashed(stream)
            archive.addfile(info, reader)
        if reader.digest.hexdigest() == file.sha256:
            return
    except FileNotFoundError:
        wrong = "is gone now"
    except OSError as fault:
        if fault.errno is not None:  # tarfile's own words have no number: it came to the end too early
            raise
        wrong = "is shorter now"
    raise say_changed(folder, f"{file.path} {wrong}")


class _Hashed:
    """A file that is read and hashed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.digest = stream, sha256()

    def read(self, size: int = -1) -> bytes:
        """As a file does."""
        chunk = self._stream.read(size)
        self.digest.update(chunk)
        return chunk


# --- in --------------------------------------------------------------------------------------------------------------


def read_carried(source: Path) -> tuple[Manifest, str]:
    """The manifest of an archive or of an exported ROOT/ARCH, and its hash; nothing is unpacked.

    Raises:
        TransferRefused: there is no such thing, or it is no archive of a cache.
        ManifestInvalid: the manifest cannot be believed.
    """
    if source.is_dir():
        return read_manifest(source)
    with opened(source) as archive:
        return _read_head(archive, source)[:2]


def import_cache(source: Path, root: Path, *, replace: bool = False) -> Carried:
    """Put a cache below a root, every hash right, under its own architecture; sealed.

    Whether it fits the stack is for the caller to ask first (`read_carried`, `manifest.compare_stack`).

    Args:
        source: an archive, or an exported ROOT/ARCH.
        root: below which ARCH is made.
        replace: another cache of this architecture makes room.

    Raises:
        TransferRefused: a member that has no place in it, or another cache is there.
        CacheDamaged: a file whose hash is wrong, or that is missing; named.
        ManifestInvalid: the manifest cannot be believed.
        PrewarmTaken: a prewarm works in what would make room.
        OSError: the root cannot be written, or its disk is full; what was written is removed.
    """
    manifest, digest = read_carried(source)
    place = arch_folder(root, manifest.architecture)
    if _is_there(place, digest, replace=replace):
        return Carried(place, manifest, digest, kept=True)
    with folder_aside(root, _IMPORTED) as aside:
        new = aside / manifest.architecture
        new.mkdir()
        if source.is_dir():
            _require_plain(source, manifest)
            copy_files(source, new, manifest.files)
            for name in (MANIFEST, MANIFEST_HASH):
                shutil.copyfile(source / name, new / name)
        else:
            _unpack(source, new, manifest, digest)
        seal(new)  # which reads every file again, from the disk that it is on now
        with without_prewarm(place):
            if place.exists():
                place.rename(aside / "replaced")
            new.rename(place)
    return Carried(place, manifest, digest)


def _require_plain(source: Path, manifest: Manifest) -> None:
    """Refuse an exported folder with a link, or a pipe that would be waited for, in the place of a file.

    Raises:
        NoPlainFile: there is one.
        CacheDamaged: a file is not there.
    """
    there = {seen.path for seen in list_files(source)}
    if missing := [f"{file.path} is not there" for file in manifest.files if file.path not in there]:
        raise say_changed(source, *missing)


def _is_there(place: Path, digest: str, *, replace: bool) -> bool:
    """Whether the very same cache is there and whole; another one must be let go by name."""
    if place.is_symlink():
        raise TransferRefused(
            f"{place} is a link, and an import would put a folder in its place, on another disk maybe. Next step: give "
            "--root the folder that holds what it leads to, or remove it."
        )
    if not place.exists() or not any(place.iterdir()):
        return False
    try:
        if is_sealed(place) and check_sealed(place).digest == digest:
            return True
        held = f"the sealed cache {read_manifest(place)[1]}" if is_sealed(place) else "a prewarm that is not sealed"
    except (ManifestInvalid, CacheDamaged, NoPlainFile, OtherArchitecture):
        held = "a damaged cache"
    if replace:
        return False
    raise TransferRefused(
        f"{place} holds {held}, and not {digest}. Likely cause: another version of the image, or an earlier import. "
        "Next step: import it into another --root, or say --replace."
    )


def _unpack(source: Path, folder: Path, manifest: Manifest, digest: str) -> None:
    wanted = {file.path: file for file in manifest.files}
    with opened(source) as archive:
        _, found, start, heads = _read_head(archive, source)
        if found != digest:  # between two looks
            raise TransferRefused(f"{source} changed while it was read. Next step: import it again.")
        for name, text in heads.items():
            (folder / name).write_bytes(text)
        while (info := archive.next()) is not None:
            path = info.name.removeprefix(start)
            is_of_it = info.isreg() and info.name.startswith(start)
            if is_of_it and is_passing(path):
                continue  # of an archive that an earlier version wrote; nobody misses it
            file = wanted.pop(path, None) if is_of_it else None
            if file is None:
                raise TransferRefused(
                    f"{source} has the member {info.name!r} ({say_kind(info)}), which its manifest does not have. "
                    "Likely cause: it was made by something else, or changed. Nothing was imported. Next step: export "
                    "the cache again."
                )
            _write_member(archive, info, folder, file, source)
    if wanted:
        raise CacheDamaged(
            f"{source} lacks {len(wanted)} file(s) of its manifest, first {next(iter(wanted))}. Likely cause: it was "
            "cut short. Nothing was imported. Next step: copy or export it again."
        )


def _write_member(archive: tarfile.TarFile, info: tarfile.TarInfo, folder: Path, file: FileSeen, source: Path) -> None:
    place, hashed = folder / file.path, sha256()
    place.parent.mkdir(parents=True, exist_ok=True)
    reader = archive.extractfile(info)
    assert reader is not None  # it is a plain file
    if info.size == file.bytes:
        with place.open("xb") as writer:
            while chunk := reader.read(_CHUNK):
                hashed.update(chunk)
                writer.write(chunk)
        os.utime(place, ns=(file.mtime_ns, file.mtime_ns))
    if info.size != file.bytes or hashed.hexdigest() != file.sha256:
        raise CacheDamaged(
            f"{source}: {file.path} is not what its manifest says ({info.size} bytes, sha256 "
            f"{hashed.hexdigest()[:12]}..., instead of {file.bytes} and {file.sha256[:12]}...). Likely cause: a "
            "damaged copy. Nothing was imported. Next step: copy or export it again."
        )


def _read_head(archive: tarfile.TarFile, source: Path) -> tuple[Manifest, str, str, dict[str, bytes]]:
    """The first two members: the manifest and its hash. Also what stands before the paths of the rest."""
    heads: dict[str, bytes] = {}
    start = ""
    for name in (MANIFEST, MANIFEST_HASH):
        info = archive.next()
        if info is None or not info.isreg() or not f"/{info.name}".endswith(f"/{name}") or info.size > _MOST_MANIFEST:
            raise TransferRefused(
                f"{source} is no archive of a JIT cache: it does not begin with {MANIFEST} and {MANIFEST_HASH}. Likely "
                "cause: another file, or one that was packed by hand. Next step: `nox -s jit_cache -- export`."
            )
        reader = archive.extractfile(info)
        assert reader is not None
        heads[name], start = reader.read(), info.name.removesuffix(name)
    manifest, digest = parse_manifest(heads[MANIFEST], heads[MANIFEST_HASH], str(source))
    if heads[MANIFEST_HASH] != hash_line(digest).encode() or not f"/{start}".endswith(f"/{manifest.architecture}/"):
        raise TransferRefused(f"{source} keeps its manifest under {start!r}. Next step: export the cache again.")
    return manifest, digest, start, heads
