"""Which cell starts next, and what this machine has for cells that run side by side: cores, and free GPU memory.

Longest first, because what starts last decides when all is done; a cell that does not fit beside what runs is passed
over by those that do. Nothing starves: when nothing runs, the first that waits is started, even if it is bigger than
the whole room.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..catalog.bridge import BridgeModule, ProbeCell
from ..evidence.receipt import Outcome, Receipt
from ..probes.order import Order
from ..process import run_command

CONTEXT_MIB: Final = 1536.0  # of a CUDA context with cuBLAS, cuDNN and Triton loaded, beside what torch allocates
RESERVE: Final = 0.05  # of a card: what its driver and a screen take
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ONLY_TIMES: Final = 0.5  # of a whole run: what is judged is left out, importing and compiling are not
RAN_WHOLE: Final = frozenset({Outcome.PASS, Outcome.FAIL, Outcome.EXPECTED_UNSUPPORTED})
_SMI_LIMIT_S: Final = 30.0


@dataclass(frozen=True)
class Need:
    """What one cell is expected to take.

    Attributes:
        memory_mib: of GPU memory at its peak.
        seconds: in all.
        kernels: a name for what it compiles at its first use; cells of one name find it in the cache when one has run.
        gpus: that it has for itself; 0 where it shares one, or needs none.
    """

    memory_mib: float
    seconds: float
    kernels: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class Room:
    """What all cells together may take at a time.

    Attributes:
        jobs: cells.
        memory_mib: GPU memory; None where it is not counted.
        gpus: names of GPUs, each for one cell at a time; empty where cells share one, or use none.
    """

    jobs: int
    memory_mib: float | None = None
    gpus: tuple[str, ...] = ()


class GpuMemory(NamedTuple):
    """Of the first GPU that a process started here would see, MiB; None where nvidia-smi does not know."""

    total_mib: float | None
    free_mib: float | None


def order_longest_first(needs: Sequence[Need]) -> tuple[int, ...]:
    """Indices in the order in which cells are to be started; equals stay as they are."""
    return tuple(sorted(range(len(needs)), key=lambda index: -needs[index].seconds))


def choose_next(
    waiting: Sequence[Need], running: Sequence[Need], room: Room, compiled: Collection[str] = ()
) -> int | None:
    """Index of the waiting cell that is to be started now; None where one that runs must end first.

    Of cells that compile the same kernels, one runs until they are compiled: side by side each would compile them all,
    and tune them against the others' load.

    Args:
        waiting, running: what each takes.
        room: what there is.
        compiled: names of kernels that a cell has compiled.
    """
    if not waiting or len(running) >= room.jobs:
        return None
    left = None if room.memory_mib is None else room.memory_mib - sum(need.memory_mib for need in running)
    free = len(room.gpus) - sum(need.gpus for need in running)
    compiling = {need.kernels for need in running} - {"", *compiled}
    fits = (
        index
        for index, need in enumerate(waiting)
        if need.kernels not in compiling and (left is None or need.memory_mib <= left) and need.gpus <= max(free, 0)
    )
    return next(fits, None if running else 0)


def plan_room(cores: int, jobs: int, memory_mib: float, total_mib: float | None, free_mib: float | None) -> Room:
    """How many cells at a time, and how much memory of the card.

    Args:
        cores: that this process may use: importing torch and a vendor library takes one for 8 seconds a cell.
        jobs: what the user gives; 0 for what suits the cores, two of which are left to the tool and the system.
        memory_mib: what the user gives; 0 for what is free now, less a reserve.
        total_mib, free_mib: of the card; None where nvidia-smi knows neither, as on a card with unified memory: then
            cells run one at a time.
    """
    if not memory_mib and (total_mib is None or free_mib is None):
        return Room(jobs=1)
    return Room(
        jobs=plan_jobs(cores, jobs),
        memory_mib=memory_mib or max(0.0, (free_mib or 0.0) - RESERVE * (total_mib or 0.0)),
    )


def plan_jobs(cores: int, jobs: int = 0) -> int:
    """How many cells at a time: what the user gives, else two less than there are cores."""
    return jobs or max(1, min(cores, 2), cores - 2)


def expect_need(order: Order, row: BridgeModule | ProbeCell, earlier: Mapping[str, Sequence[Receipt]]) -> Need:
    """What a cell is expected to take: what its row says, more where an earlier receipt says more.

    Args:
        order: the cell.
        row: of its bridge module, or of itself.
        earlier: receipts by probe, of any stack on the same target.
    """
    seen = [receipt for receipt in earlier.get(order.probe, ()) if receipt.outcome in RAN_WHOLE]
    # Without a GPU, a receipt has the resident memory of the process.
    peaks = [receipt.peak_memory_mib for receipt in seen if receipt.machine.gpu]
    seconds = [receipt.seconds["total"] for receipt in seen if "total" in receipt.seconds]
    took = max(seconds, default=row.seconds)
    return Need(
        memory_mib=max([row.gpu_memory_mib, *peaks]) + CONTEXT_MIB,
        seconds=took * _ONLY_TIMES if order.only_times else took,
        kernels=f"{order.stack}/{order.probe}" if row.compiles else "",
    )


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
        jobs, memory_mib: what the user gives; 0 for what suits this machine.
    """
    cores = count_cores()
    if not gpu:
        return Room(plan_jobs(cores, jobs))
    return plan_room(cores, jobs, memory_mib, *read_gpu_memory(variables))


def read_gpu_memory(variables: Mapping[str, str]) -> GpuMemory:
    """Ask nvidia-smi. A GPU that shares the memory of the host answers "[N/A]"."""
    first = variables.get(VISIBLE, "").split(",")[0].strip() or "0"
    try:
        total, free = (float(field) for field in _ask_smi("memory.total,memory.free", variables, f"--id={first}")[0])
    except (LookupError, ValueError):
        return GpuMemory(None, None)
    return GpuMemory(total, free)


def read_gpus(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them; empty where there is none."""
    if VISIBLE in variables:
        return tuple(name.strip() for name in variables[VISIBLE].split(",") if name.strip() not in ("", "-1"))
    return tuple(row[0] for row in _ask_smi("index", variables))


def _ask_smi(query: str, variables: Mapping[str, str], *options: str) -> list[list[str]]:
    """The rows that nvidia-smi prints; none where it does not exist or fails."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *options]
    try:
        ended = run_command(command, limit_s=_SMI_LIMIT_S, variables=variables, apart=True)
    except OSError:
        return []
    rows = ended.words.splitlines() if ended.code == 0 else []
    return [[field.strip() for field in row.split(",")] for row in rows if row.strip()]
