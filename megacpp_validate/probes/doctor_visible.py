"""Which libraries are mapped into this process, and which the loader would find by name."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

# Libraries of which a second file in one process, or on the way to one, is a finding.
CUDA_LIBRARIES: Final = re.compile(r"lib(?:cudart|cublas|cublasLt|cudnn\w*|nccl|nvrtc|transformer_engine)\.so[.\d]*")
RUNTIMES: Final = ("libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13")
_LDCONFIG: Final = ("/sbin/ldconfig", "/usr/sbin/ldconfig", "ldconfig")
_PLACES: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu",
                  "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu")  # fmt: skip
_LIMIT_S: Final = 20.0


def read_mapped(maps: Path = Path("/proc/self/maps")) -> tuple[Path, ...]:
    """Every file that this process has mapped as code or data of a library, and the interpreter itself."""
    try:
        text = maps.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ()
    files = {line.split(maxsplit=5)[5] for line in text.splitlines() if len(line.split(maxsplit=5)) == 6}
    program = os.path.realpath("/proc/self/exe")
    return tuple(Path(file) for file in sorted(files) if file.startswith("/") and (".so" in file or file == program))


def group_cuda(files: Iterable[Path]) -> dict[str, tuple[str, ...]]:
    """The CUDA libraries among some files, by their name without version: "libcudnn" -> its files."""
    groups: dict[str, dict[str, None]] = {}
    for file in files:
        if CUDA_LIBRARIES.fullmatch(file.name):
            groups.setdefault(file.name.partition(".so")[0], {}).setdefault(str(file))
    return {name: tuple(found) for name, found in sorted(groups.items())}


def find_by_name(soname: str, first: Iterable[Path] = ()) -> tuple[Path, ...]:
    """The files that the loader knows under a name, in the order in which it looks; the same file once."""
    folders = [*first, *(Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)]
    places = [folder / soname for folder in folders]
    places += [Path(file) for file in read_loader_cache().get(soname, ())]
    places += [Path(place, soname) for place in _PLACES]
    found: dict[str, Path] = {}
    for place in places:
        with suppress(OSError):
            if place.is_file():
                found.setdefault(os.path.realpath(place), place)
    return tuple(found.values())


def read_visible() -> dict[str, tuple[str, ...]]:
    """The CUDA libraries that the loader finds by name, on `LD_LIBRARY_PATH` and in its cache."""
    names = set(RUNTIMES)
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        with suppress(OSError):
            names |= {file.name for file in Path(entry).iterdir()} if entry else set()
    names |= set(read_loader_cache())
    wanted = sorted(name for name in names if CUDA_LIBRARIES.fullmatch(name) and re.search(r"\.so\.\d+(\.0)?$", name))
    return {name: tuple(map(str, files)) for name in wanted if (files := find_by_name(name))}


def open_runtimes() -> dict[str, str]:
    """What `dlopen` gives for each CUDA runtime: the question that cuDNN's frontend asks. It maps what it finds."""
    found = {}
    for name in RUNTIMES:
        before = set(read_mapped())
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        after = [file for file in read_mapped() if re.fullmatch(rf"{re.escape(name)}[.\d]*", file.name)]
        new = [file for file in after if file not in before] or after
        found[name] = str(new[0]) if new else name
    return found


@cache
def read_loader_cache() -> dict[str, tuple[str, ...]]:
    """The cache of the loader: name -> files; empty where it cannot be read."""
    for program in _LDCONFIG:
        try:
            done = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        found: dict[str, list[str]] = {}
        for name, file in re.findall(r"^\s*(\S+) \(.*?\) => (\S+)$", done.stdout, re.MULTILINE):
            found.setdefault(name, []).append(file)
        return {name: tuple(files) for name, files in found.items()}
    return {}


def read_driver_cuda() -> str:
    """The newest CUDA release that the driver runs, such as "13.0"; empty where there is no driver."""
    with suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return ""
