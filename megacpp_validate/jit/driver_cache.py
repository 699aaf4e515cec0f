"""A copy of the CUDA driver's cache for each process: its files do not say who compiled them.

The driver keeps there what it makes of PTX, and NVRTC (since CUDA 12.9) what cuDNN, Transformer Engine and torch had it
compile. Neither tells anyone, so that their compiles are seen in files alone; in a folder that other processes write to
at the same time, a process would be blamed for theirs. So it works on a copy, and gives back what is new at its end.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from .compiles import saw

VARIABLE: Final = "CUDA_CACHE_PATH"  # else .nv/ComputeCache of the home folder
SOURCE: Final = "MEGACPP_JIT_DRIVER_CACHE"  # of whoever started this process, where that one works on a copy itself
MOST_BYTES: Final = 512 * 2**20  # copied in a second or two; what is larger holds what other programs left
_NAMED: Final = "megacpp-cuda-"
_LOCK: Final = ".lock"
_KERNEL: Final = re.compile(rb"\.text\.([A-Za-z_$][\w$.]{1,160})")  # a section of machine code, named after its kernel
_NAMELESS: Final = b"PTX"
_driver_files: Final[set[str]] = set()  # that were there when they were last looked at
_copies: Final[list[tuple[Path, Path, int, int]]] = []  # source, copy, its lock and its process: one or none
_shared: Final[list[str]] = []  # why there is none


def work_on_copy() -> None:
    """Have the driver keep its cache in a copy; before CUDA is initialised, once a process.

    Where there can be none (no room, a cache of gigabytes), all stays as it was, and `why_shared` says so.
    """
    source = Path(os.environ.get(SOURCE) or driver_cache())
    if _copies or _shared:
        return
    copy = None
    try:
        found = sorted(list_kernels(source))
        if (size := sum(map(_size, (source / name for name in found)))) > MOST_BYTES:
            _shared.append(f"{source} has {size >> 20} MiB, too much to be copied for each process")
            return
        _forget_the_dead()
        copy = Path(tempfile.mkdtemp(prefix=_NAMED))
        lock = _lock(copy)
        for name in found:
            place = copy / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the driver has thrown it away meanwhile
                shutil.copyfile(source / name, place)
    except OSError as fault:
        if copy is not None:
            shutil.rmtree(copy, ignore_errors=True)
        _shared.append(f"{source} cannot be copied: {fault.strerror or fault}")
        return
    _copies.append((source, copy, lock, os.getpid()))
    os.environ[SOURCE], os.environ[VARIABLE] = str(source), str(copy)
    atexit.register(give_back)


def give_back() -> None:
    """Put what is new in the copy where it came from, and remove the copy. What cannot be written is lost, silently."""
    while _copies and _copies[-1][-1] == os.getpid():  # a child that was forked gives nothing back
        source, copy, lock, _ = _copies.pop()
        for name in list_kernels(copy):
            if not (source / name).exists():
                with suppress(OSError):
                    _put(copy / name, source / name)
        os.environ[VARIABLE] = str(source)
        shutil.rmtree(copy, ignore_errors=True)
        os.close(lock)


def _lock(copy: Path) -> int:
    """Held as long as the process lives. It is named once it is held: before, the copy would pass for a dead one."""
    lock = os.open(copy / f"{_LOCK}-to-be", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (copy / f"{_LOCK}-to-be").rename(copy / _LOCK)
    return lock


def _forget_the_dead() -> None:
    """Remove copies whose process was killed: nobody holds their locks."""
    for place in Path(tempfile.gettempdir()).glob(f"{_NAMED}*/{_LOCK}"):
        with suppress(OSError):  # another user's, or gone by now
            lock = os.open(place, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place.parent, ignore_errors=True)
            finally:
                os.close(lock)


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _put(path: Path, place: Path) -> None:
    """Whole, or not at all: what lies aside meanwhile is named as what nobody keeps (`jitcache.files`)."""
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(path, aside)
        aside.replace(place)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def list_kernels(folder: Path) -> set[str]:
    """Files of a cache that hold kernels, relative to it: not the driver's index, locks, and what is half given back.

    Raises:
        OSError: it cannot be read.
    """
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != "index" and not path.name.startswith(".")
    }


def driver_cache() -> Path:
    """Where the driver keeps it now. Raises `RuntimeError` where there is no home folder."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".nv" / "ComputeCache")


def why_shared() -> str:
    """Why this process works on a folder that others write to; empty where it does not, or never asked for a copy."""
    return _shared[0] if _shared else ""


def watch_driver() -> None:
    """Remember what the driver has compiled by now."""
    _driver_files.update(_files_of_driver())


def look_at_driver() -> None:
    """Note what was compiled since, by the name of its kernel; nothing where it may be another process's."""
    new = sorted(_files_of_driver() - _driver_files)
    _driver_files.update(new)
    if not why_shared():
        for name, kernel in _name_kernels(new).items():
            saw("cuda", kernel, name, 0.0, cached=False, looked_for=name)


def name_driver_kernels() -> list[str]:
    """Of each file in the driver's cache of this process, the name of its kernel; "PTX" where it has none."""
    return sorted(_name_kernels(sorted(_files_of_driver())).values())


def _name_kernels(files: Sequence[str]) -> dict[str, str]:
    """File -> kernel. NVRTC keeps two a kernel: its machine code, where a section has the name, and what was before."""
    texts = {name: _read(name) for name in files}
    found = {name: match[1] for name, text in texts.items() if (match := _KERNEL.search(text))}
    kernels = sorted(set(found.values()), key=len, reverse=True)
    for name in files:
        found.setdefault(name, next((one for one in kernels if one in texts[name]), _NAMELESS))
    return {name: found[name].decode() for name in files}


def _read(name: str) -> bytes:
    try:
        return (driver_cache() / name).read_bytes()
    except (OSError, RuntimeError):
        return b""


def _files_of_driver() -> set[str]:
    try:
        return list_kernels(driver_cache())
    except (OSError, RuntimeError):
        return set()
