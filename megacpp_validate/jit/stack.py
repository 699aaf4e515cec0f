"""What the caches depend on, as it is installed here: versions, the compiler of CUDA C++, and where its headers lie."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from sysconfig import get_path
from typing import Any, Final

# Name in the answer -> names of the distribution, the first that is installed.
_PACKAGES: Final = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cutlass": ("nvidia-cutlass-dsl",),
    "flash-attn-4": ("flash-attn-4",),
    "quack-kernels": ("quack-kernels",),
    "apache-tvm-ffi": ("apache-tvm-ffi",),
    "deep-gemm": ("deep-gemm", "sgl-deep-gemm"),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
}
_HEADERS: Final = "include"


def read_versions() -> dict[str, str]:
    """Versions of what compiles and of what is compiled; what is not installed is not there."""
    found = {"python": platform.python_version()}
    for name, distributions in _PACKAGES.items():
        for distribution in distributions:
            with suppress(PackageNotFoundError):
                found[name] = version(distribution)
                break
    with suppress(Exception):  # without torch, or with one that is damaged, the rest still counts
        import torch

        found["torch"] = str(torch.__version__)
        found["cuda"] = torch.version.cuda or ""
        found["isa"] = str(torch.backends.cpu.get_cpu_capability())
        found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        found["c++ headers"] = os.pathsep.join((str(Path(torch.__file__).with_name(_HEADERS)), get_path(_HEADERS)))
    found["driver"] = _driver()
    found["working folder"] = str(Path.cwd())
    found["c++"] = _first_line([os.environ.get("CXX") or "g++", "--version"])
    return found


def read_compiler() -> dict[str, str]:
    """What compiles CUDA C++: mode (MEGACPP_JIT_MODE), and the path and version of nvcc; empty where there is none."""
    path = _nvcc()
    said = _output([path, "--version"]) if path else ""
    release = re.search(r"release [\d.]+, V([\d.]+)", said)
    return {"mode": os.environ.get("MEGACPP_JIT_MODE", ""), "path": path, "version": release[1] if release else ""}


def read_include_paths() -> list[str]:
    """Where DeepGEMM's and CUDA's headers lie: both are in the key of DeepGEMM's kernels, as paths."""
    found = []
    for module in ("deep_gemm",):
        for entry in sys.path:
            folder = Path(entry or ".", module, _HEADERS)
            if folder.is_dir():
                found.append(str(folder.resolve()))
                break
    if path := _nvcc():
        found.append(str(Path(path).resolve().parents[1] / _HEADERS))
    return found


def _nvcc() -> str:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        path = Path(os.environ.get(variable, "") or "/nonexistent", "bin", "nvcc")
        if path.is_file():
            return str(path)
    return shutil.which("nvcc") or ""


def _driver() -> str:
    with suppress(OSError):
        found = re.search(r"Kernel Module(?: for \w+)?\s+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else ""
    return ""


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).splitlines()), "").strip()


def _output(command: list[Any]) -> str:
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
