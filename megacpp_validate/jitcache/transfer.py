"""A sealed cache carried elsewhere: as one archive, such as a layer of an image, or as a folder of a volume.

An archive holds ARCH/manifest.json, ARCH/manifest.sha256, then the files of the manifest in its order, and nothing
else: the same cache gives the same bytes. On import everything is unpacked aside, each file compared with its hash, and
renamed when all are right; so a cache is there whole, or not at all.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import ToolError, WrongArguments
from ..process import run_command
from .files import CacheChanged, hash_file, is_temporary
from .layout import MANIFEST, MANIFEST_HASH, arch_folder
from .manifest import Manifest, parse_manifest, read_manifest
from .place import folder_aside
from .progress import hold_folder
from .seal import check_files, check_sealed, copy_files, is_sealed, seal

_IMPORTED: Final = ".import-"
_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_GZIP_LEVEL: Final = 1  # kernels shrink to about a half at any level
_ZSTD_LIMIT_S: Final = 3600.0
_MOST_MANIFEST: Final = 256 * 2**20  # bytes; of 100,000 files it takes 30 MB


@dataclass(frozen=True)
class Carried:
    """What was exported or imported.

    Attributes:
        place: the archive, or ROOT/ARCH.
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


def export_cache(folder: Path, target: Path, *, prefix: str = "") -> Carried:
    """Write a sealed cache to an archive (.tar, .tar.gz, .tar.zst), or below a folder.

    Args:
        folder: ROOT/ARCH, sealed.
        target: the archive; a name without such an ending is a folder, which gets ARCH/.
        prefix: of the paths in the archive, such as "opt/megacpp/jit", for a layer that is laid over an image.

    Raises:
        WrongArguments: it is not sealed, or the target is there.
        CacheChanged: the cache is not what its manifest says.
        OSError: the target cannot be written or its disk is full; what was written is removed.
    """
    if not is_sealed(folder):
        raise WrongArguments(
            f"{folder} is not sealed, so that an export could hold half of it. Next step: `nox -s jit_cache -- seal`, "
            "or `nox -s prewarm` to its end."
        )
    checked = check_sealed(folder)
    manifest = checked.manifest
    if not target.name.endswith(_SUFFIXES):
        place = arch_folder(target, manifest.architecture)
        if place.exists():
            raise WrongArguments(f"{place} exists already. Next step: give another folder, or remove that one.")
        with folder_aside(target, _IMPORTED) as aside:
            _copy_sealed(folder, aside / manifest.architecture, manifest).rename(place)
        return Carried(place, manifest, checked.digest, extra=checked.extra)
    with folder_aside(target.parent, ".export-") as aside:
        part = _write_archive(aside, target.name, folder, manifest, prefix)
        digest, size = hash_file(part), part.stat().st_size
        part.replace(target)
    return Carried(target, manifest, checked.digest, f"sha256:{digest}", size, extra=checked.extra)


def _copy_sealed(source: Path, new: Path, manifest: Manifest) -> Path:
    """A sealed copy of a whole cache: sealing reads every file again, from the disk that it is on now."""
    new.mkdir()
    copy_files(source, new, manifest.files)
    for name in (MANIFEST, MANIFEST_HASH):
        shutil.copyfile(source / name, new / name)
    seal(new)
    return new


def _write_archive(aside: Path, name: str, folder: Path, manifest: Manifest, prefix: str) -> Path:
    start = f"{prefix.strip('/')}/{manifest.architecture}/".lstrip("/")
    part = aside / "archive.tar"
    with part.open("xb") as file:
        zipped = gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) if name.endswith(("gz", "tgz")) else None
        with zipped or nullcontext(file) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
            for path in (MANIFEST, MANIFEST_HASH, *(one.path for one in manifest.files)):
                with (folder / path).open("rb") as reader:
                    # A plain read-only file of root's, without a time: that stands in the manifest, in full.
                    info = tarfile.TarInfo(start + path)
                    info.size, info.mode = (folder / path).stat().st_size, 0o444
                    archive.addfile(info, reader)
    if not name.endswith(".zst"):
        return part
    _run_zstd("-3", "-T0", str(part), "-o", str(part.with_suffix(".zst")))
    return part.with_suffix(".zst")


def _run_zstd(*words: str) -> None:
    """Compress or decompress a file: Python has zstd from 3.14 on.

    Raises:
        WrongArguments: there is no zstd, or the archive is damaged.
        OSError: the disk is full.
    """
    if shutil.which("zstd") is None:
        raise WrongArguments(
            "the archive ends in .zst, and zstd is not installed here. Next step: install zstd, or use .tar.gz."
        )
    ended = run_command(["zstd", "-q", *words], limit_s=_ZSTD_LIMIT_S)
    if ended.code != 0:
        if "No space left" in ended.words:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), words[-1])
        raise WrongArguments(
            f"zstd failed ({ended.how}): {ended.last_words}. Likely cause: the archive was cut short or damaged. "
            "Nothing was imported. Next step: copy or export it again."
        )


# --- in --------------------------------------------------------------------------------------------------------------


def read_carried(source: Path) -> tuple[Manifest, str]:
    """The manifest of an archive or of an exported ROOT/ARCH, and its hash; nothing is unpacked for good.

    Raises:
        WrongArguments: there is no such thing, or it is not an archive of a cache.
        CacheChanged: the manifest is not the one that its hash is of.
        ManifestInvalid: the manifest cannot be believed.
    """
    if source.is_dir():
        return read_manifest(source)
    with _opened(source) as archive:
        return _read_head(archive, source)[:2]


def import_cache(source: Path, root: Path, *, replace: bool = False) -> Carried:
    """Put a cache below a root, every hash right, under its own architecture; sealed.

    Whether it fits the stack is for the caller to ask first (`read_carried`, `manifest.compare_stack`).

    Args:
        source: an archive, or an exported ROOT/ARCH.
        root: below which ARCH is made.
        replace: another cache of this architecture makes room.

    Raises:
        WrongArguments: a member that has no place in it, or another cache is there.
        CacheChanged: a file whose hash is wrong, or that is missing; named.
        ManifestInvalid: the manifest cannot be believed.
        InfrastructureFailed: a prewarm works in what would make room.
        OSError: the root cannot be written, or its disk is full; what was written is removed.
    """
    manifest, digest = read_carried(source)
    place = arch_folder(root, manifest.architecture)
    if _is_there(place, digest, replace=replace):
        return Carried(place, manifest, digest, kept=True)
    with folder_aside(root, _IMPORTED) as aside:
        new = aside / manifest.architecture
        if source.is_dir():
            check_files(source, manifest)  # before a pipe or a link in the place of a file is opened
            _copy_sealed(source, new, manifest)
        else:
            new.mkdir()
            _unpack(source, new, manifest)
            seal(new)
        with hold_folder(place):
            if place.exists():
                place.rename(aside / "replaced")
            new.rename(place)
    return Carried(place, manifest, digest)


def _is_there(place: Path, digest: str, *, replace: bool) -> bool:
    """Whether the very same cache is there and whole; another one must be let go by name."""
    if not place.exists() or not any(place.iterdir()):
        return False
    with suppress(ToolError):
        if is_sealed(place) and check_sealed(place).digest == digest:
            return True
    if replace:
        return False
    raise WrongArguments(
        f"{place} holds another cache (or a damaged one, or a prewarm that is not sealed), and not {digest}. Likely "
        "cause: another version of the image, or an earlier import. "
        "Next step: import it into another --root, or say --replace."
    )


@contextmanager
def _opened(source: Path) -> Iterator[tarfile.TarFile]:
    """An archive to read. A damaged one raises `WrongArguments`, whatever its form makes of it."""
    if not source.is_file():
        raise WrongArguments(f"there is no archive {source}. Next step: give one that `jit_cache export` wrote.")
    try:
        if source.name.endswith(".zst"):
            with folder_aside(Path(tempfile.gettempdir()), "megacpp-jit-zstd-") as aside:
                _run_zstd("-d", str(source), "-o", str(aside / "archive.tar"))
                with tarfile.open(aside / "archive.tar", "r:") as archive:
                    yield archive
            return
        with tarfile.open(source, "r:*") as archive:
            yield archive
    except (tarfile.TarError, EOFError, zlib.error, OSError) as fault:
        if isinstance(fault, OSError) and fault.errno is not None:  # a damaged gzip has no number
            raise
        raise WrongArguments(
            f"{source} cannot be unpacked: {fault}. Likely cause: it was cut short or damaged. Nothing was imported. "
            "Next step: copy or export it again."
        ) from fault


def _unpack(source: Path, folder: Path, manifest: Manifest) -> None:
    missing = {file.path: file for file in manifest.files}
    with _opened(source) as archive:
        _, _, start = _read_head(archive, source)
        wanted = []
        for member in archive.getmembers():
            path = member.name.removeprefix(start)
            plain = member.isreg() and member.name.startswith(start)
            if plain and is_temporary(path):
                continue  # of an archive that an earlier version wrote
            if plain and path in missing:
                del missing[path]
            elif not plain or path not in (MANIFEST, MANIFEST_HASH):
                raise WrongArguments(
                    f"{source} has the member {member.name!r}, which its manifest does not have as a plain file. "
                    "Likely cause: it was made by something else, or changed. Nothing was imported. Next step: export "
                    "the cache again."
                )
            wanted.append(member.replace(name=path, mode=0o644, deep=False))
        if missing:
            raise CacheChanged(
                f"{source} lacks {len(missing)} file(s) of its manifest, first {next(iter(missing))}. Likely cause: it "
                "was cut short. Nothing was imported. Next step: copy or export it again."
            )
        archive.extractall(folder, wanted, filter="data")
    for file in manifest.files:
        os.utime(folder / file.path, ns=(file.mtime_ns, file.mtime_ns))


def _read_head(archive: tarfile.TarFile, source: Path) -> tuple[Manifest, str, str]:
    """The first two members: the manifest and its hash; and what stands before the paths of the rest."""
    heads: list[bytes] = []
    start = ""
    for name in (MANIFEST, MANIFEST_HASH):
        member = archive.next()
        reader = archive.extractfile(member) if member is not None and member.isreg() else None
        if reader is None or member is None or member.size > _MOST_MANIFEST or Path(member.name).name != name:
            raise WrongArguments(
                f"{source} is not an archive of a JIT cache: it does not begin with {MANIFEST} and {MANIFEST_HASH}. "
                "Likely cause: another file, or one that was packed by hand. Next step: `nox -s jit_cache -- export`."
            )
        heads.append(reader.read())
        start = member.name.removesuffix(name)
    manifest, digest = parse_manifest(heads[0], heads[1], str(source))
    if not f"/{start}".endswith(f"/{manifest.architecture}/"):
        raise WrongArguments(f"{source} keeps its manifest under {start!r}. Next step: export the cache again.")
    return manifest, digest, start
