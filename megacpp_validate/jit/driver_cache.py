"""A private copy of the CUDA driver's cache for each process: files of a shared one do not show who made them.

The driver keeps there what it compiles from PTX, and NVRTC (since CUDA 12.9) what cuDNN, Transformer Engine and torch
have it compile. Neither reports a compile: new files are all there is to see. In a folder that other processes write to
as well, those files may be theirs (issue 23: 34 of them were blamed on `imports` in a clean step). So files count as
compiles in a private copy alone, and what is new in the copy goes back to the shared folder when the process ends.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

VARIABLE: Final = "CUDA_CACHE_PATH"  # else .nv/ComputeCache of the home folder
SOURCE: Final = "MEGACPP_JIT_DRIVER_CACHE"  # of whoever started this process, where that one works on a copy itself
_NAMED: Final = "megacpp-cuda-"
_KERNEL: Final = re.compile(rb"\.text\.([A-Za-z_$][\w$.]{1,160})")  # a section of machine code, named after its kernel
_NAMELESS: Final = b"PTX"
_driver_files: Final[set[str]] = set()  # that were there when they were last looked at
_copies: Final[list[tuple[Path, Path, int]]] = []  # source, copy and its process: one or none
_shared: Final[list[str]] = []  # why compiles of the driver are not counted


def work_on_copy() -> None:
    """Have the driver keep its cache in a copy; before CUDA is initialised, once a process.

    Where a copy cannot be made (no space), the driver goes on in the shared folder, and
    `why_shared` names the reason.
    """
    if _copies or _shared:
        return
    temporary = Path(tempfile.gettempdir())
    copy = temporary / f"{_NAMED}{os.getpid()}"
    try:
        source = Path(os.environ.get(SOURCE) or driver_cache())
        found = list_kernels(source)
        for dead in temporary.glob(f"{_NAMED}*"):  # of a killed process
            if not Path("/proc", dead.name.removeprefix(_NAMED)).exists():
                shutil.rmtree(dead, ignore_errors=True)
        copy.mkdir(mode=0o700)
        for name in found:
            with suppress(FileNotFoundError):  # the driver has removed it meanwhile
                _put(source / name, copy / name)
    except (OSError, RuntimeError) as fault:
        shutil.rmtree(copy, ignore_errors=True)
        _shared.append(f"the driver's cache cannot be copied: {getattr(fault, 'strerror', None) or fault}")
        return
    _copies.append((source, copy, os.getpid()))
    os.environ[SOURCE], os.environ[VARIABLE] = str(source), str(copy)
    atexit.register(give_back)


def give_back() -> None:
    """Copy new files to the shared folder and remove the copy. What cannot be written is lost, without an error."""
    while is_private():
        source, copy, _ = _copies.pop()
        for name in list_kernels(copy):
            if not (source / name).exists():
                with suppress(OSError):
                    _put(copy / name, source / name)
        os.environ[VARIABLE] = str(source)
        shutil.rmtree(copy, ignore_errors=True)


def is_private() -> bool:
    """Whether the driver's cache is this process's own: a child that was forked shares that of its parent."""
    return bool(_copies) and _copies[-1][-1] == os.getpid()


def _put(path: Path, place: Path) -> None:
    """Write it whole or not at all. The name of the partial file is one that no listing of a cache counts."""
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(path, aside)
        aside.replace(place)
    finally:
        aside.unlink(missing_ok=True)


def list_kernels(folder: Path) -> set[str]:
    """Files of a cache that hold kernels, relative to it: neither the driver's index nor partial files.

    Raises:
        OSError: it cannot be read.
    """
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != "index" and not path.name.startswith(".")
    }


def driver_cache() -> Path:
    """The folder of the driver's cache now. Raises `RuntimeError` where there is no home folder."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".nv" / "ComputeCache")


def why_shared() -> str:
    """Why compiles of the driver are not counted; empty where the cache is private, or no file has appeared in it."""
    return _shared[0] if _shared else ""


def watch_driver() -> None:
    """Remember what the driver has compiled by now."""
    _driver_files.update(_files_of_driver())


def list_compiled() -> dict[str, str]:
    """File -> kernel, of what was compiled since the last look; nothing of a shared folder: it may be another's."""
    new = _files_of_driver() - _driver_files
    _driver_files.update(new)
    if is_private():
        return name_kernels(new)
    if new and not _shared:
        _shared.append(f"files appeared in {driver_cache()}, which other processes write to as well")
    return {}


def name_kernels(files: Iterable[str]) -> dict[str, str]:
    """File -> kernel, of the driver's cache of this process; "PTX" where no name is found.

    NVRTC keeps two files a kernel: its machine code, where a section has the name, and what that was made of.

    Args:
        files: relative to the cache.
    """
    texts = {}
    for name in sorted(files):
        with suppress(OSError):
            texts[name] = (driver_cache() / name).read_bytes()
    found = {name: match[1] for name, text in texts.items() if (match := _KERNEL.search(text))}
    kernels = sorted(set(found.values()), key=len, reverse=True)
    for name, text in texts.items():
        found.setdefault(name, next((one for one in kernels if one in text), _NAMELESS))
    return {name: found[name].decode() for name in texts}


def _files_of_driver() -> set[str]:
    with suppress(OSError, RuntimeError):
        return list_kernels(driver_cache())
    return set()
