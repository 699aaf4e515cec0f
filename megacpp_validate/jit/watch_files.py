"""What is seen in files alone: the CUDA driver's own cache, and libraries built by torch.utils.cpp_extension."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any, Final

from .compiles import saw
from .late import after_import

DRIVER: Final = "CUDA_CACHE_PATH"  # else .nv/ComputeCache of the home folder
_driver_files: Final[set[str]] = set()


def watch_files() -> None:
    """Remember what the driver has compiled by now, and hook the extensions."""
    _driver_files.update(_files_of_driver())
    after_import("torch.utils.cpp_extension", _hook)


def look_at_driver() -> None:
    """Note what the driver has compiled since: PTX that no library has machine code for. It may be another's."""
    for name in sorted(_files_of_driver() - _driver_files):
        _driver_files.add(name)
        saw("cuda", "PTX", name, 0.0, cached=False)


def _files_of_driver() -> set[str]:
    try:
        folder = Path(os.environ.get(DRIVER) or Path.home() / ".nv" / "ComputeCache")
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "index"}
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
