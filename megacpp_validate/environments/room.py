"""What this machine has for cells that run side by side: its cores, and the memory of its GPU that is free."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .gpu_memory import read_gpu_memory
from .schedule import Room, plan_jobs, plan_room


def count_cores() -> int:
    """Those that this process may use, where the system says so."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def share_cores(variables: Mapping[str, str], jobs: int) -> dict[str, str]:
    """The user's variables; processes side by side share the cores, unless the user has decided that."""
    return {"OMP_NUM_THREADS": str(max(1, count_cores() // jobs)), **variables}


def read_room(variables: Mapping[str, str], *, gpu: bool, jobs: int, memory_mib: float = 0.0) -> Room:
    """What all cells together may take at a time.

    Args:
        variables: environment variables of the user, which choose the GPU.
        gpu: whether the cells run on one.
        jobs, memory_mib: what was asked for; 0 for what suits this machine.
    """
    cores = count_cores()
    if not gpu:
        return Room(plan_jobs(cores, jobs))
    return plan_room(cores, jobs, memory_mib, *read_gpu_memory(variables))
