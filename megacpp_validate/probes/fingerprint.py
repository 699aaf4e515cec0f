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
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from ..evidence.receipt import Library, Machine, Package

MAPS: Final = Path("/proc/self/maps")
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


def read_mapped(maps: Path = MAPS) -> tuple[Path, ...]:
    """Every file that this process has mapped as code or data of a library, and the interpreter itself."""
    program = os.path.realpath("/proc/self/exe")
    lines = (line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8", errors="replace").splitlines())
    files = {line[5] for line in lines if len(line) == 6 and line[5].startswith("/")}
    return tuple(Path(file) for file in sorted(files) if ".so" in file or file == program)


def read_libraries(maps: Path = MAPS) -> tuple[Library, ...]:
    """Every CUDA library that this process has mapped; a second copy of one is a second file."""
    files, libraries = read_mapped(maps), []
    for name, (function, weights) in _LIBRARIES.items():
        mapped = tuple(str(file) for file in files if re.fullmatch(rf"{name}\.so[.\d]*", file.name))
        if mapped:
            versions = dict.fromkeys(filter(None, (_ask_version(file, function, weights) for file in mapped)))
            libraries.append(Library(name, ", ".join(versions), mapped))
    return tuple(libraries)


@cache
def read_machine(gpu: bool) -> Machine:
    """Where this process runs.

    Args:
        gpu: whether to ask for the GPU; a probe on the target `cpu` has no business with one.
    """
    import torch

    on_gpu, load = {}, f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    if gpu and torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        on_gpu = {"gpu": str(torch.cuda.get_device_name()), "capability": capability, "driver": _read_driver()}
        free, total = torch.cuda.mem_get_info()
        load += f"; GPU {(total - free) >> 20} of {total >> 20} MiB in use"
        with suppress(Exception):  # needs nvidia-ml-py, which no stack has to have
            load += f", {torch.cuda.utilization()}% busy at {torch.cuda.clock_rate()} MHz"
    return Machine(
        host=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        load=load,
        **on_gpu,
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


# Library -> the function that gives its version, and the weights of major, minor and patch in the number that it gives;
# without weights it is asked for each (MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of library_types.h).
_LIBRARIES: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "libcudart": ("cudaRuntimeGetVersion", (1000, 10)),
    "libcublas": ("cublasGetProperty", ()),
    "libcublasLt": ("cublasLtGetProperty", ()),
    "libcudnn": ("cudnnGetVersion", (10000, 100, 1)),
    "libnccl": ("ncclGetVersion", (10000, 100, 1)),
    "libnvrtc": ("", ()),
    "libtransformer_engine": ("", ()),
}


def _ask_version(file: str, function: str, weights: tuple[int, ...]) -> str:
    """What a library that is already loaded says of itself; it is not loaded for that."""
    if not function:
        return ""
    number, parts = ctypes.c_int(), []
    with suppress(OSError, AttributeError):
        ask = getattr(ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), function)
        if not weights:
            for which in range(3):
                ask(which, ctypes.byref(number))
                parts.append(number.value)
        elif function == "cudnnGetVersion":  # which returns a size_t
            number.value = ask()
        else:
            ask(ctypes.byref(number))
    rest = number.value
    for weight in weights:
        parts.append(rest // weight)
        rest %= weight
    return ".".join(map(str, parts)) if any(parts) else ""


def _read_driver() -> str:
    """The driver's version, from NVIDIA's management library."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(text, 96) == 0:
            return text.value.decode(errors="replace")
    return ""
