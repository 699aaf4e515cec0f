"""What a process has loaded and where it runs: read from the process itself, not from what is installed.

The version that is imported need not be the one that a package index lists, and the cuDNN that is mapped need not be
the one beside torch. So packages are taken from `sys.modules`, libraries from the process's memory map.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from ..evidence.receipt import Library, Machine, Package

# Module -> the distributions that may have brought it, first match wins.
PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "torch": ("torch",),
    "transformer_engine": ("transformer-engine",),
    "transformer_engine_torch": ("transformer-engine-torch",),
    "flash_attn": ("flash-attn", "flash-attn-4"),
    "flash_attn_interface": ("flash-attn-3", "flash-attn", "xformers"),
    "flash_attn_3": ("flash-attn-3", "xformers"),
    "deep_gemm": ("deep-gemm", "sgl-deep-gemm"),
    "triton": ("triton",),
    "cutlass": ("nvidia-cutlass-dsl",),
    "cudnn": ("nvidia-cudnn-frontend",),
    "liger_kernel": ("liger-kernel",),
    "numpy": ("numpy",),
}


def read_packages() -> tuple[Package, ...]:
    """Every vendor package that this process has loaded, and every other copy of it on the path."""
    packages = []
    for name, distributions in PACKAGES.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        version = read_version(distributions) or str(getattr(module, "__version__", ""))
        packages.append(Package(name, version, file, find_copies(name, file, tuple(sys.path))))
    return tuple(packages)


def read_libraries(maps: Path = Path("/proc/self/maps")) -> tuple[Library, ...]:
    """Every CUDA library that this process has mapped; a second copy of one is a second file."""
    try:
        text = maps.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ()
    files = sorted({line.split(maxsplit=5)[5] for line in text.splitlines() if ".so" in line and "/" in line})
    libraries = []
    for name, ask in _LIBRARIES.items():
        mapped = tuple(file for file in files if re.fullmatch(rf"{name}\.so[.\d]*", Path(file).name))
        if mapped:
            versions = dict.fromkeys(filter(None, (_ask_version(file, ask) for file in mapped)))
            libraries.append(Library(name, ", ".join(versions), mapped))
    return tuple(libraries)


@cache
def read_machine(gpu: bool) -> Machine:
    """Where this process runs.

    Args:
        gpu: whether to ask for the GPU; a probe on the target `cpu` has no business with one.
    """
    import torch

    here = Machine(
        host=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
    )
    if not gpu or not torch.cuda.is_available():
        return here
    major, minor = torch.cuda.get_device_capability()
    return Machine(
        host=here.host,
        platform=here.platform,
        python=here.python,
        torch=here.torch,
        cuda=here.cuda,
        gpu=str(torch.cuda.get_device_name()),
        capability=f"{major}.{minor}",
        driver=_read_driver(),
    )


@cache
def read_version(distributions: tuple[str, ...]) -> str:
    """The version of the first of some distributions that is installed; empty where none is."""
    for name in distributions:
        # A damaged install raises what it likes, and gives None where METADATA is gone.
        with suppress(Exception):
            if found := metadata.version(name):
                return found
    return ""


@cache
def find_copies(name: str, file: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """Folders and files on the path that would be imported under this name if they came first."""
    loaded = os.path.realpath(file) if file else ""
    copies: dict[str, None] = {}
    for entry in path:
        for place in (Path(entry, name, "__init__.py"), Path(entry, f"{name}.py")):
            with suppress(OSError):
                if place.is_file() and os.path.realpath(place) != loaded:
                    copies.setdefault(str(place))
    return tuple(copies)


def _dotted(number: int, *places: int) -> str:
    """A version that is packed into an integer: `places` are the weights of major, minor, patch."""
    parts = []
    for place in places:
        parts.append(str(number // place))
        number %= place
    return ".".join(parts)


def _cudart(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    library.cudaRuntimeGetVersion(ctypes.byref(number))
    return _dotted(number.value, 1000, 10)


def _property(function: str) -> Callable[[ctypes.CDLL], str]:
    def ask(library: ctypes.CDLL) -> str:
        numbers = []
        for which in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of library_types.h
            number = ctypes.c_int()
            getattr(library, function)(which, ctypes.byref(number))
            numbers.append(str(number.value))
        return ".".join(numbers)

    return ask


def _cudnn(library: ctypes.CDLL) -> str:
    library.cudnnGetVersion.restype = ctypes.c_size_t
    number = int(library.cudnnGetVersion())
    return _dotted(number, 10000, 100, 1) if number >= 90000 else _dotted(number, 1000, 100, 1)


def _nccl(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return _dotted(number.value, 10000, 100, 1)


_LIBRARIES: Final[dict[str, Callable[[ctypes.CDLL], str] | None]] = {
    "libcudart": _cudart,
    "libcublas": _property("cublasGetProperty"),
    "libcublasLt": _property("cublasLtGetProperty"),
    "libcudnn": _cudnn,
    "libnccl": _nccl,
    "libnvrtc": None,
    "libtransformer_engine": None,
}


def _ask_version(file: str, ask: Callable[[ctypes.CDLL], str] | None) -> str:
    """What a library that is already loaded says of itself; it is not loaded for that."""
    if ask is None:
        return ""
    with suppress(OSError, AttributeError):
        return ask(ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    return ""


def _read_driver() -> str:
    """The driver's version, from NVIDIA's management library."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(text, 96) == 0:
            return text.value.decode(errors="replace")
    return ""
