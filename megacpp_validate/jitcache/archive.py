"""The form of an archive of caches: a tar, plain or compressed, of plain files alone."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .manifest import ManifestInvalid

SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.zst")
# What a person gives who means an archive, and of which there would be a folder with that name.
_OTHER_FORM: Final = re.compile(
    r"\.(tar\.\w+|tbz2?|txz|tzst|tlz|zip|7z|rar|cpio|gz|bz2|xz|zst|lz4|lzma|br)$", re.IGNORECASE
)
_GZIP_LEVEL: Final = 1  # kernels shrink to about a half at any level
_ZSTD: Final = "zstd"  # Python has it from 3.14 on


class TransferRefused(RuntimeError):
    """An archive or a folder that is not taken; the text says what happened, the likely cause and the next step."""


def refuse_other_form(target: Path) -> None:
    """Refuse the name of an archive that is none of these.

    Raises:
        TransferRefused: it is one.
    """
    if found := _OTHER_FORM.search(target.name):
        raise TransferRefused(
            f"{target} ends in {found[0]}, and archives are written as {', '.join(SUFFIXES)}. Next step: name one of "
            "them, or a folder."
        )


def plain_member(name: str, size: int) -> tarfile.TarInfo:
    """A plain read-only file of root's, without a time: that stands in the manifest, in full."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    return info


def say_kind(info: tarfile.TarInfo) -> str:
    """What a member is, in words."""
    kinds = {"a link": info.issym() or info.islnk(), "a folder": info.isdir(), "a plain file": info.isreg()}
    return next((word for word, is_it in kinds.items() if is_it), "no plain file")


@contextmanager
def compressed(place: Path, name: str) -> Iterator[Any]:
    """A new file to write a tar to, compressed as `name` ends.

    Raises:
        TransferRefused: there is no zstd.
        OSError: it cannot be written, or the disk is full.
    """
    with place.open("xb") as file:
        if name.endswith((".gz", ".tgz")):
            with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as stream:
                yield stream
        elif name.endswith(".zst"):
            with _zstd(["-q", "-3", "-T0"], stdin=subprocess.PIPE, stdout=file) as process:
                assert process.stdin is not None
                try:
                    yield process.stdin
                    process.stdin.close()
                except BrokenPipeError:
                    pass  # it has ended, and says why
                _require_end(process, place)
        else:
            yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def opened(source: Path) -> Iterator[tarfile.TarFile]:
    """An archive, read from front to end. A damaged one raises `TransferRefused`, whatever its form makes of it."""
    if not source.is_file():
        raise TransferRefused(f"there is no archive {source}. Next step: give one that `jit_cache export` wrote.")
    try:
        if source.name.endswith(".zst"):
            with source.open("rb") as file, _zstd(["-q", "-d"], stdin=file, stdout=subprocess.PIPE) as process:
                with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                    yield archive
                process.kill()  # what follows the last member is padding
            return
        with tarfile.open(source, "r|*") as archive:
            yield archive
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError) as fault:
        if isinstance(fault, ManifestInvalid):
            raise
        raise TransferRefused(
            f"{source} cannot be unpacked: {fault}. Likely cause: it was cut short or damaged. Nothing was imported. "
            "Next step: copy or export it again."
        ) from fault
    except OSError as fault:
        if fault.errno is not None:
            raise
        raise TransferRefused(  # zlib's own words have no number
            f"{source} cannot be unpacked: {fault}. Likely cause: it is damaged. Nothing was imported. Next step: copy "
            "or export it again."
        ) from fault


@contextmanager
def _zstd(words: Sequence[str], **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    program = shutil.which(_ZSTD)
    if program is None:
        raise TransferRefused(
            "there is no zstd here, which an archive that ends in .zst takes. Next step: install zstd, or take .tar.gz."
        )
    with subprocess.Popen([program, *words], stderr=subprocess.PIPE, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def _require_end(process: subprocess.Popen[bytes], place: Path) -> None:
    """Let the compressor end.

    Raises:
        OSError: it could not write: the disk is full, as a rule.
    """
    if process.wait() != 0:
        said = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
        full = os.strerror(errno.ENOSPC) in said
        raise OSError(errno.ENOSPC if full else errno.EIO, said[-300:] or "zstd failed", str(place))
