"""Many cells, run to a receipt each: which one starts next, and what is run again.

`run_cells` is the one runner. What starts a cell is a back end: processes of this machine (`run_here`), or jobs of a
Slurm (`slurm.SlurmJobs`). An attempt that a fault of the infrastructure ended is repeated, and the receipt lists the
fault; a numeric failure and a crash are answers. So is a cell that took too long twice, the second time alone: other
processes, or a cold cache, may have slowed it down the first time.

On this machine the longest cell starts first, because the cell that starts last decides when the run ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ..diagnosis.diagnose import find_retry_fault
from ..evidence.receipt import Outcome, Receipt, write_receipt
from ..process import Processes, run_command
from .cell import Cell, find_done, receipt_without_probe

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
MOST_ON_A_GPU: Final = 8  # cells that share a card: each takes up to 15 GB of it


@dataclass(frozen=True)
class Room:
    """What all cells together may take at a time: so many cells, and each of these GPUs for one cell."""

    jobs: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Event:
    """A cell started, ended, or is to be run again.

    Attributes:
        cell: which one.
        receipt: None where it starts now, or is to be run again.
        reused: the receipt is of an earlier run.
        done, total: cells of the run that have ended, and all.
        note: the node that it ran on, or the infrastructure fault that ended an attempt.
    """

    cell: Cell
    receipt: Receipt | None
    reused: bool
    done: int
    total: int
    note: str = ""


Progress = Callable[[Event], None]
"""Called from the thread that runs the cells."""


class Ran(NamedTuple):
    """How a cell ended: its receipt, whether that is of an earlier run, and the node; empty where that is unknown."""

    receipt: Receipt
    reused: bool = False
    node: str = ""


@dataclass(eq=False)
class Attempt:
    """A cell that is waiting, running, or has `ran`; and the infrastructure faults that ended earlier attempts."""

    cell: Cell
    faults: list[str] = field(default_factory=list)
    ran: Ran | None = None


class Attempted(NamedTuple):
    """The end of an attempt: its receipt (None where it left none), the fault that ended it, and where it ran."""

    attempt: Attempt
    receipt: Receipt | None
    fault: str = ""
    node: str = ""


class BackEnd(Protocol):
    """What starts cells."""

    def has_room(self, attempt: Attempt, running: Sequence[Attempt]) -> bool:
        """Whether an attempt can be started now beside those that run."""

    def start(self, attempt: Attempt) -> None:
        """Start it, or find it started by an earlier run."""

    def wait(self) -> Sequence[Attempted]:
        """Attempts that have ended; may be none after a while."""

    def stop(self) -> None:
        """Stop everything that runs."""


def run_cells(
    cells: Sequence[Cell], back_end: BackEnd, *, fresh: bool = True, retries: int = 0,
    progress: Progress = lambda _: None,
) -> tuple[Ran, ...]:  # fmt: skip
    """Run every cell, or take its receipt where that answers its order; one with a problem is `not-run`, unwritten.

    Args:
        back_end: what starts the cells; stopped where anything is raised, an interrupt too.
        fresh: run again what an earlier run has a receipt of.
        retries: of one cell, after infrastructure faults.
        progress: called with what becomes of each cell.

    Returns:
        How each ended, in their order.

    Raises:
        OSError: a folder cannot be written.
        Stopped: everything was stopped.
    """
    every = [Attempt(cell) for cell in cells]
    running: list[Attempt] = []

    def report(attempt: Attempt, note: str = "") -> None:
        done = sum(one.ran is not None for one in every)
        receipt, reused, node = attempt.ran or (None, False, "")
        progress(Event(attempt.cell, receipt, reused, done, len(every), note or node))

    for attempt in (one for one in every if one.cell.problem):
        attempt.ran = Ran(receipt_without_probe(attempt.cell.order, Outcome.NOT_RUN, attempt.cell.problem))
    for attempt in (one for one in every if one.ran is None and not fresh):
        if (done := find_done(attempt.cell.order, attempt.cell.place)) is not None:
            attempt.ran = Ran(done, reused=True)
            report(attempt)
    waiting = sorted((one for one in every if one.ran is None), key=lambda one: -one.cell.seconds)
    try:
        while waiting or running:
            while ready := next((one for one in waiting if back_end.has_room(one, running)), None):
                waiting.remove(ready)
                report(ready)
                ready.cell.folder.mkdir(parents=True, exist_ok=True)
                back_end.start(ready)
                running.append(ready)
            for ended in back_end.wait():
                running.remove(ended.attempt)
                ended.attempt.ran = _settle(ended, retries)
                if ended.attempt.ran is None:
                    waiting.insert(0, ended.attempt)
                report(ended.attempt, "" if ended.attempt.ran else ended.attempt.faults[-1])
    except BaseException:  # an interrupt too: nothing may keep running behind it
        back_end.stop()
        raise
    return tuple(attempt.ran for attempt in every if attempt.ran is not None)


def _settle(ended: Attempted, retries: int) -> Ran | None:
    """How a cell ended; None where it is to be run again after an infrastructure fault."""
    cell, faults = ended.attempt.cell, ended.attempt.faults
    receipt, again, fault = ended.receipt, False, ended.fault
    if receipt is not None and receipt.outcome is Outcome.TIMEOUT and not faults:
        fault, retries = f"timeout: {receipt.reason}", max(retries, 1)
    if receipt is None or (fault and retries):
        faults.append(fault)
        reason = f"given up after {len(faults)} infrastructure fault(s), the last: {fault}"
        receipt = replace(receipt_without_probe(cell.order, Outcome.NOT_RUN, reason), retries=tuple(faults))
        again = len(faults) <= retries
    elif faults:
        receipt = replace(receipt, retries=(*receipt.retries, *faults))
    if faults and not (again and find_done(cell.order, cell.place)):
        write_receipt(receipt, cell.place)  # a later run counts these faults, too
    return None if again else Ran(receipt, node=ended.node)


@dataclass
class LocalCells:
    """Cells as processes of this machine.

    No cell can touch another: each has a process, a working folder and a log of its own. Cells that share a device take
    turns on it by a file.

    Attributes:
        room: what all of them may take at a time.
        processes: that theirs are among.
        scratch: for their working folders.
    """

    room: Room
    processes: Processes
    scratch: Path
    _running: dict[Future[Receipt], tuple[Attempt, tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=max(1, self.room.jobs))

    def has_room(self, attempt: Attempt, running: Sequence[Attempt]) -> bool:
        """Whether a job and its GPUs are free; what needs more GPUs than there are, or runs again, runs alone."""
        free = len(self.room.gpus) - sum(one.cell.gpus for one in running)
        beside = len(running) < self.room.jobs and attempt.cell.gpus <= max(free, 0)
        return not running or (beside and not any(one.faults for one in (attempt, *running)))

    def start(self, attempt: Attempt) -> None:
        """Start it, on GPUs of its own where it needs them; the order keeps its identity: any of them would do."""
        cell = attempt.cell
        taken = {name for _, names in self._running.values() for name in names}
        gpus = tuple(name for name in self.room.gpus if name not in taken)[: cell.gpus]
        if cell.gpus:
            variables = {**cell.environment.variables, VISIBLE: ",".join(gpus)}
            cell = replace(cell, environment=replace(cell.environment, variables=variables))
        work = Path(tempfile.mkdtemp(dir=self.scratch), "cell")
        self._running[self._pool.submit(cell.run, work, self.processes)] = attempt, gpus

    def wait(self) -> list[Attempted]:
        """Those that ended, once one has."""
        ended = [(self._running.pop(future)[0], future.result())
                 for future in wait(self._running, return_when=FIRST_COMPLETED).done]  # fmt: skip
        return [Attempted(attempt, receipt, find_retry_fault(receipt)) for attempt, receipt in ended]

    def stop(self) -> None:
        """Kill every process."""
        self.processes.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


def run_here(
    cells: Sequence[Cell], room: Room, processes: Processes, *, fresh: bool = True, retries: int = 0,
    progress: Progress = lambda _: None,
) -> tuple[Ran, ...]:  # fmt: skip
    """Run every cell on this machine, or take its receipt where that answers its order; see `run_cells`."""
    with tempfile.TemporaryDirectory(prefix="megacpp-", ignore_cleanup_errors=True) as scratch:
        back_end = LocalCells(room, processes, Path(scratch))
        return run_cells(cells, back_end, fresh=fresh, retries=retries, progress=progress)


def plan_jobs(jobs: int = 0, *, gpu: bool = False) -> int:
    """How many cells at a time: what the user gives, else two less than there are cores, with a limit for one GPU.

    Importing torch and a vendor library takes one core for 8 seconds a cell.
    """
    cores = count_cores()
    return jobs or min(max(1, min(cores, 2), cores - 2), MOST_ON_A_GPU if gpu else cores)


def count_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def share_cores(variables: Mapping[str, str], jobs: int) -> dict[str, str]:
    """The user's variables; processes side by side share the cores, unless the user has decided that."""
    return {"OMP_NUM_THREADS": str(max(1, count_cores() // jobs)), **variables}


def read_gpus(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them; empty where there is none."""
    if VISIBLE in variables:
        return tuple(name.strip() for name in variables[VISIBLE].split(",") if name.strip() not in ("", "-1"))
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    ended = run_command(command, limit_s=30.0, variables=variables, apart=True)
    return tuple(ended.words.split()) if ended.code == 0 else ()
