"""What is seen in files alone: the cache of the CUDA driver and NVRTC, and libraries of torch.utils.cpp_extension."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .compiles import saw
from .driver_cache import driver_cache, list_kernels, why_shared
from .late import after_import

_KERNEL: Final = re.compile(rb"\.text\.([A-Za-z_$][\w$.]{1,160})")  # a section of machine code, named after its kernel
_NAMELESS: Final = b"PTX"
_driver_files: Final[set[str]] = set()


def watch_files() -> None:
    """Remember what the driver has compiled by now, and hook the extensions."""
    _driver_files.update(_files_of_driver())
    after_import("torch.utils.cpp_extension", _hook)


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


def _hook(module: Any) -> None:
    plain = module._run_ninja_build
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def _run_ninja_build(build_directory: str, *args: Any, **more: Any) -> Any:
        folder, began = Path(build_directory), time.perf_counter()
        before = _built(folder)
        made = plain(build_directory, *args, **more)
        is_new = _built(folder) != before
        seconds = time.perf_counter() - began if is_new else 0.0
        saw("torch_extensions", folder.name, "C++", seconds, cached=not is_new)
        return made

    module._run_ninja_build = _run_ninja_build


def _built(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime for path in folder.glob("*.so")}
