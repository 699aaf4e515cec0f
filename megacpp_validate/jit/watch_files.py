"""What is seen in files alone: the cache of the CUDA driver and NVRTC, and libraries of torch.utils.cpp_extension."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path
from typing import Any, Final

from .compiles import saw
from .driver_cache import driver_cache, why_shared
from .late import after_import

_KERNEL: Final = re.compile(rb"\.text\.([A-Za-z_$][\w$.]{1,160})")  # a section of machine code, named after its kernel
_NO_KERNELS: Final = ("index", ".lock")
_SAME: Final = "PTX"  # where no name can be read
_driver_files: Final[set[str]] = set()


def watch_files() -> None:
    """Remember what the driver has compiled by now, and hook the extensions."""
    _driver_files.update(_files_of_driver())
    after_import("torch.utils.cpp_extension", _hook)


def look_at_driver() -> None:
    """Note what was compiled since, by the name of its kernel; nothing where it may be another process's."""
    for name in sorted(_files_of_driver() - _driver_files):
        _driver_files.add(name)
        if not why_shared():
            saw("cuda", _kernel_of(name), name, 0.0, cached=False, looked_for=name)


def _kernel_of(name: str) -> str:
    try:
        found = _KERNEL.search((driver_cache() / name).read_bytes())
    except (OSError, RuntimeError):
        return _SAME
    return found[1].decode() if found else _SAME


def _files_of_driver() -> set[str]:
    try:
        folder = driver_cache()
        return {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and path.name not in _NO_KERNELS
        }
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
