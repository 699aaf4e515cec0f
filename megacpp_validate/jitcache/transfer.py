"""What the verb jit_cache does with a sealed cache: check, seal, unseal, open, export and import.

A cache is carried as one archive, such as a layer of an image, and imported from one or from a ROOT/ARCH. An archive
holds ARCH/manifest.json, ARCH/manifest.sha256, then the files of the manifest in its order, and nothing else: the same
cache gives the same bytes. On import everything is unpacked aside, each file compared with its hash, and renamed when
all are right; so a cache is there whole, or not at all.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from .. import TOOL
from ..catalog.bridge import Catalog
from ..errors import EvidenceMissing, ToolError, WrongArguments
from ..process import run_command
from .layout import MANIFEST, MANIFEST_HASH, NVRTC, arch_folder, cache_arch, cache_variables, folder_aside, hold_folder
from .manifest import CacheChanged, Manifest, compare_stack, hash_file, is_temporary, parse_manifest, read_manifest
from .result import JitCacheResult, StackDifference
from .seal import check_files, check_sealed, copy_files, is_at_home, is_sealed, open_working, seal, unseal
from .stack import JitOptions, open_stack

_IMPORTED: Final = ".import-"
_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_GZIP_LEVEL: Final = 1  # kernels shrink to about a half at any level
_ZSTD_LIMIT_S: Final = 3600.0
_MOST_MANIFEST: Final = 256 * 2**20  # bytes; of 100,000 files it takes 30 MB


@dataclass(frozen=True)
class CacheOptions:
    """What to do, and with what.

    Attributes:
        place: archive or folder to export to, or to import.
        arch: of the cache; the only one below the root where it is empty.
        work: root of the working copy of `open`.
        prefix: of the paths in an exported archive.
        replace: an import replaces another cache.
        any_stack: an import does not compare the cache with the stack.
        shared: any user may add files beside the sealed ones.
    """

    action: Literal["check", "seal", "unseal", "export", "import", "open"]
    place: Path | None = None
    arch: str = ""
    work: Path | None = None
    prefix: str = ""
    replace: bool = False
    any_stack: bool = False
    shared: bool = False


def run_cache(catalog: Catalog, jit: JitOptions, options: CacheOptions) -> JitCacheResult:
    """One action.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full, or a folder cannot be written.
    """
    started, root = time.monotonic(), jit.place()
    if options.action == "import":
        result = _import(catalog, jit, options, root)
    else:
        result = _act(_find_folder(root, options.arch), options)
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 2)})


def _act(folder: Path, options: CacheOptions) -> JitCacheResult:
    action = options.action
    if action == "export":
        if options.place is None or not options.place.name.endswith(_SUFFIXES):
            raise WrongArguments("no archive is named. Next step: name one such as jit.tar.zst.")
        return export_cache(folder, options.place.absolute(), prefix=options.prefix)
    if action == "seal":
        seal(folder, shared=options.shared)
    checked = check_sealed(folder)
    if action == "unseal":
        unseal(folder)
    if action != "open":
        sealed = action == "unseal" or is_sealed(folder)
        return _describe(action, folder, checked.manifest, checked.digest, extra=checked.extra, sealed=sealed)
    if options.work is None:
        raise WrongArguments("no folder is named. Next step: name a folder that you can write with --work.")
    place = open_working(folder, checked.manifest, options.work.absolute())
    variables = cache_variables(place.parent, folder.name, nvrtc=checked.manifest.mode == NVRTC)
    return _describe(action, place, checked.manifest, checked.digest, variables=variables, in_place=True)


def _find_folder(root: Path, arch: str) -> Path:
    """ROOT/ARCH; the only one with a manifest where no architecture is named."""
    if arch:
        return arch_folder(root, arch)
    found = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    if not found:
        raise EvidenceMissing(
            f"{root} has no cache with a manifest. Likely cause: nothing was prewarmed there, a prewarm did not end, "
            "or a folder may not be read. Next step: give the root of the caches with --root, or prewarm to the end."
        )
    if len(found) > 1:
        there = ", ".join(path.name for path in found)
        raise WrongArguments(f"{root} has {len(found)} caches ({there}). Next step: name one with --arch.")
    return found[0]


def _describe(action: str, folder: Path, manifest: Manifest, digest: str, **more: Any) -> JitCacheResult:
    fields = {"in_place": is_at_home(folder, manifest), **more}
    return JitCacheResult(
        tool=TOOL, deed=action, folder=str(folder), architecture=manifest.architecture, manifest=digest,
        mode=manifest.mode, made=manifest.made, stack=manifest.stack.versions, caches=manifest.sizes,
        tasks=tuple(task.id for task in manifest.tasks), missing=manifest.missing, **fields,
    )  # fmt: skip


def _import(catalog: Catalog, jit: JitOptions, options: CacheOptions, root: Path) -> JitCacheResult:
    if options.place is None:
        raise WrongArguments("no cache to import is named. Next step: name an archive, or an exported folder.")
    source = options.place.absolute()
    manifest, digest = read_carried(source)
    if not options.any_stack and (differences := _find_differences(catalog, manifest, jit, root)):
        return _describe("import", source, manifest, digest, differences=differences)
    return import_cache(source, root, replace=options.replace)


def _find_differences(catalog: Catalog, manifest: Manifest, jit: JitOptions, root: Path) -> tuple[StackDifference, ...]:
    """In what the cache and the stack that is here differ; what only a GPU reports is left out where none is seen."""
    target = next((row for row in catalog.targets if cache_arch(row.arch) == manifest.architecture), None)
    if target is None:
        raise WrongArguments(
            f"the cache is of {manifest.architecture}, and matrix/targets.toml has no target with that. Next step: add "
            "one, or say --any-stack."
        )
    with open_stack(catalog, target, jit, root) as stack:
        seen, architecture = stack.read_seen(), manifest.architecture
        if stack.facts.gpu is not None and target.arch:
            architecture = cache_arch(stack.facts.gpu.arch)
        elif target.arch:
            of_gpu = {name: text for name, text in manifest.stack.versions.items() if name in ("gpu", "driver")}
            seen = seen.model_copy(update={"versions": {**seen.versions, **of_gpu}})
        return compare_stack(manifest, seen, architecture, manifest.mode)


# --- out -------------------------------------------------------------------------------------------------------------


def export_cache(folder: Path, target: Path, *, prefix: str = "") -> JitCacheResult:
    """Write a sealed cache to an archive (.tar, .tar.gz, .tar.zst).

    Args:
        folder: ROOT/ARCH, sealed.
        target: the archive.
        prefix: of the paths in the archive, such as "opt/megacpp/jit", for a layer that is laid over an image.

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
    with folder_aside(target.parent, ".export-") as aside:
        part = _write_archive(aside, target.name, folder, checked.manifest, prefix)
        digest, size = hash_file(part), part.stat().st_size
        part.replace(target)
    return _describe(
        "export", folder, checked.manifest, checked.digest, archive=str(target), archive_hash=f"sha256:{digest}",
        archive_bytes=size, extra=checked.extra,
    )  # fmt: skip


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


def import_cache(source: Path, root: Path, *, replace: bool = False) -> JitCacheResult:
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
        return _describe("import", place, manifest, digest, kept=True)
    with folder_aside(root, _IMPORTED) as aside:
        new = aside / manifest.architecture
        new.mkdir()
        if source.is_dir():
            check_files(source, manifest)  # before a pipe or a link in the place of a file is opened
            copy_files(source, new, manifest.files)
            for name in (MANIFEST, MANIFEST_HASH):
                shutil.copyfile(source / name, new / name)
        else:
            _unpack(source, new, manifest)
        seal(new)  # which reads every file again, from the disk that it is on now
        with hold_folder(place):
            if place.exists():
                place.rename(aside / "replaced")
            new.rename(place)
    return _describe("import", place, manifest, digest)


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
