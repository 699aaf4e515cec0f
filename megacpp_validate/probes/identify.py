"""What an interpreter has, told in a second and without importing any of it: torch, Transformer Engine, GPU, driver."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .fingerprint import read_version

_LIMIT_S = 30.0
_QUERY = "name,compute_cap,driver_version,memory.total"


def identify() -> dict[str, Any]:
    """The facts; empty strings and no GPU where something is not there."""
    gpu, why_no_gpu = read_gpu()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": platform.machine(),
        "torch": read_version(("torch",)),
        "te": read_version(("transformer-engine",)),
        "te_folder": next(map(str, find_package("transformer_engine")[0]), ""),
        "gpu": gpu,
        "why_no_gpu": why_no_gpu,
    }


def read_gpu() -> tuple[dict[str, str] | None, str]:
    """The first GPU that a process started here would see, and why there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = (visible or "").split(",")[0].strip()
    if visible is not None and first in ("", "-1"):
        return None, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"--id={first or '0'}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        return None, "there is no nvidia-smi on the path, and so no NVIDIA driver"
    except (OSError, subprocess.TimeoutExpired) as fault:
        return None, f"nvidia-smi did not answer: {fault}"
    fields = [field.strip() for field in done.stdout.strip().split(",")]
    if done.returncode or len(fields) != 4:
        said = " ".join((done.stdout or done.stderr).split())
        return None, f"nvidia-smi sees no GPU: {said or f'exit status {done.returncode}'}"
    return dict(zip(("name", "capability", "driver", "memory_mib"), fields, strict=True)), ""


def find_package(top: str) -> tuple[tuple[Path, ...], Path | None]:
    """The folders of a top-level package and its first file; finding it runs none of its code."""
    try:
        spec = find_spec(top)
    except Exception:  # a damaged install raises what it likes
        spec = None
    if spec is None:
        return (), None
    first = Path(spec.origin) if spec.origin and spec.has_location else None
    return tuple(map(Path, spec.submodule_search_locations or ())), first
