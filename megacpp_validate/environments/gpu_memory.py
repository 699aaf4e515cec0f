"""How much memory the device has, and how much of it is free now."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Final, NamedTuple

_QUERY: Final = "memory.total,memory.free"
_LIMIT_S: Final = 30.0


class GpuMemory(NamedTuple):
    """Of the first GPU that a process started here would see, MiB; None where it does not tell."""

    total_mib: float | None
    free_mib: float | None


def read_gpu_memory(variables: Mapping[str, str]) -> GpuMemory:
    """Ask nvidia-smi. A GPU that shares the memory of the host answers "[N/A]"."""
    first = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"--id={first}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=True, env=dict(variables)
        )
        total, free = (float(field) for field in done.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return GpuMemory(None, None)
    return GpuMemory(total, free)
