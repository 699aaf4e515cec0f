"""Many cells, run to a receipt each: which one starts next, what is run again, and what this machine has room for.

`run_cells` is the one runner. What starts a cell is a back end: processes of this machine (`LocalCells`), or jobs of a
Slurm (`slurm.SlurmJobs`). An attempt that a fault of the infrastructure ended is repeated, and the receipt lists the
fault; a numeric failure, a crash and a cell that took too long are answers.

On this machine the longest cell starts first, because the cell that starts last decides when the run ends. A cell that
does not fit beside those that run is passed over. When nothing runs, the first cell starts even if it is bigger than
the whole room.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ..catalog.bridge import BridgeModule, ProbeCell
from ..evidence.receipt import Outcome, Receipt, write_receipt
from ..evidence.store import ReceiptInvalid, read_receipt
from ..probes.order import Order
from ..process import Processes, run_command
from .cell import Cell, answers, find_done, find_fault, receipt_of_given_up
from .plan import receipt_without_probe

CONTEXT_MIB: Final = 1536.0  # of a CUDA context with cuBLAS, cuDNN and Triton loaded, beside what torch allocates
RESERVE: Final = 0.05  # of a card: what its driver and a screen take
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ONLY_TIMES: Final = 0.5  # of a whole run: what is judged is left out, importing and compiling are not
_RAN_WHOLE: Final = frozenset({Outcome.PASS, Outcome.FAIL, Outcome.EXPECTED_UNSUPPORTED})
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

    memory_mib: float = 0.0
    seconds: float = 0.0
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
    """A cell that is waiting or running.

    Attributes:
        index: of the cell in its run.
        faults: that ended earlier attempts.
        node: that the last of them ended on, where the fault accuses the node.
    """

    index: int
    cell: Cell
    need: Need
    faults: list[str] = field(default_factory=list)
    node: str = ""


class Attempted(NamedTuple):
    """The end of an attempt: its receipt (None where it left none), the fault that ended it, and where it ran."""

    attempt: Attempt
    receipt: Receipt | None
    fault: str = ""
    node: str = ""
    accused: bool = False


class BackEnd(Protocol):
    """What starts cells."""

    def choose(self, waiting: Sequence[Attempt], running: Sequence[Attempt]) -> int | None:
        """The place in `waiting` of the attempt that is to be started now; None where one that runs must end first."""

    def start(self, attempt: Attempt) -> None:
        """Start it, or find it started by an earlier run."""

    def wait(self, seconds: float | None) -> Sequence[Attempted]:
        """Attempts that have ended; may be none after so many seconds."""

    def stop(self) -> None:
        """Stop everything that runs."""


def run_cells(
    cells: Sequence[tuple[Cell, Need]], back_end: BackEnd, *, fresh: bool = True, retries: int = 0,
    progress: Progress = lambda _: None, wait_s: float = 0.0,
) -> tuple[Ran, ...]:  # fmt: skip
    """Run every cell, or take its receipt where that answers its order.

    Args:
        cells: with what each is expected to take.
        back_end: what starts them; stopped where anything is raised, an interrupt too.
        fresh: run again what an earlier run has a receipt of.
        retries: of one cell, after infrastructure faults.
        progress: called with what becomes of each cell.
        wait_s: for all cells; those that have not ended by then are stopped and not run. 0 for no limit.

    Returns:
        How each ended, in their order.

    Raises:
        OSError: a folder cannot be written.
        Stopped: everything was stopped.
    """
    run, began = _Run(len(cells), retries, progress), time.monotonic()
    for index, (cell, need) in enumerate(cells):
        done = None if fresh else find_done(cell.order, cell.place)
        if done is not None:
            run.end(index, cell, Ran(done, reused=True))
        else:
            cell.folder.mkdir(parents=True, exist_ok=True)
            run.waiting.append(Attempt(index, cell, need, [] if fresh else _read_faults(cell, retries)))
    run.waiting.sort(key=lambda attempt: -attempt.need.seconds)
    try:
        while run.waiting or run.running:
            while run.waiting and (place := back_end.choose(run.waiting, run.running)) is not None:
                attempt = run.waiting.pop(place)
                run.report(attempt.cell)
                back_end.start(attempt)
                run.running.append(attempt)
            left_s = began + wait_s - time.monotonic() if wait_s else None
            if left_s is not None and left_s <= 0:
                back_end.stop()
                reason = f"it was not done within the {wait_s / 60:g} min of --wait"
                for late in (*run.waiting, *run.running):
                    run.end(late.index, late.cell, Ran(receipt_without_probe(late.cell.order, Outcome.NOT_RUN, reason)))
                break
            for ended in back_end.wait(left_s):
                run.settle(ended)
    except BaseException:  # an interrupt too: nothing may keep running behind it
        back_end.stop()
        raise
    return tuple(run.ended[index] for index in range(len(cells)))


@dataclass
class _Run:
    """The cells of one run, and what became of them."""

    total: int
    retries: int
    progress: Progress
    waiting: list[Attempt] = field(default_factory=list)
    running: list[Attempt] = field(default_factory=list)
    ended: dict[int, Ran] = field(default_factory=dict)

    def settle(self, ended: Attempted) -> None:
        """End a cell, or let it wait again after an infrastructure fault."""
        attempt, receipt = ended.attempt, ended.receipt
        cell, order = attempt.cell, attempt.cell.order
        self.running.remove(attempt)
        if ended.fault and (self.retries or receipt is None):
            attempt.faults.append(ended.fault)
            attempt.node = ended.node if ended.accused else attempt.node
            receipt, again = receipt_of_given_up(order, attempt.faults), len(attempt.faults) <= self.retries
            if not again or find_done(order, cell.place) is None:
                write_receipt(receipt, cell.place)  # a later run counts these faults, too
            if again:
                self.waiting.insert(0, attempt)
                self.report(cell, note=ended.fault)
                return
        elif receipt is not None and attempt.faults:
            receipt = replace(receipt, retries=(*receipt.retries, *attempt.faults))
            write_receipt(receipt, cell.place)
        if receipt is not None:
            self.end(attempt.index, cell, Ran(receipt, node=ended.node))

    def end(self, index: int, cell: Cell, ran: Ran) -> None:
        """Take note of how a cell ended."""
        self.ended[index] = ran
        self.report(cell, ran.receipt, reused=ran.reused, note=ran.node)

    def report(self, cell: Cell, receipt: Receipt | None = None, *, reused: bool = False, note: str = "") -> None:
        """Call the progress."""
        self.progress(Event(cell, receipt, reused, len(self.ended), self.total, note))


def _read_faults(cell: Cell, retries: int) -> list[str]:
    """The faults that ended attempts of an earlier run; a cell that it gave up has a new chance."""
    try:
        receipt = read_receipt(cell.place)
    except ReceiptInvalid:
        return []
    counts = receipt.outcome is Outcome.NOT_RUN and answers(cell.order, receipt) and len(receipt.retries) <= retries
    return list(receipt.retries) if counts else []


@dataclass
class LocalCells:
    """Cells as processes of this machine, within the cores, the GPUs and the memory that there are.

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
    compiled: set[str] = field(default_factory=set)
    _running: dict[Future[Receipt], tuple[Attempt, tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=max(1, self.room.jobs))

    def choose(self, waiting: Sequence[Attempt], running: Sequence[Attempt]) -> int | None:
        """The first that fits beside those that run."""
        return choose_next([a.need for a in waiting], [a.need for a in running], self.room, self.compiled)

    def start(self, attempt: Attempt) -> None:
        """Start it, on GPUs of its own where it needs them; the order keeps its identity: any of them would do."""
        cell, count = attempt.cell, attempt.need.gpus
        taken = {name for _, names in self._running.values() for name in names}
        gpus = tuple(name for name in self.room.gpus if name not in taken)[:count]
        if count:
            variables = {**cell.environment.variables, VISIBLE: ",".join(gpus)}
            cell = replace(cell, environment=replace(cell.environment, variables=variables))  # type: ignore[type-var]
        work = Path(tempfile.mkdtemp(dir=self.scratch), "cell")
        self._running[self._pool.submit(cell.run, work, self.processes)] = attempt, gpus

    def wait(self, seconds: float | None) -> list[Attempted]:
        """Those that ended, once one has."""
        ended = []
        for future in wait(self._running, seconds, return_when=FIRST_COMPLETED).done:
            (attempt, _), receipt = self._running.pop(future), future.result()
            if receipt.outcome in _RAN_WHOLE:
                self.compiled.add(attempt.need.kernels)
            ended.append(Attempted(attempt, receipt, find_fault(receipt)))
        return ended

    def stop(self) -> None:
        """Kill every process."""
        self.processes.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Fleet:
    """Cells on this machine; see `run_cells`.

    Attributes:
        room: what all of them may take at a time.
    """

    room: Room
    fresh: bool = True
    progress: Progress = lambda _: None
    retries: int = 0
    wait_s: float = 0.0

    def run(self, cells: Sequence[tuple[Cell, Need]], processes: Processes) -> tuple[Ran, ...]:
        """Run every cell, or take its receipt where that answers its order. Raises as `run_cells`."""
        with tempfile.TemporaryDirectory(prefix="megacpp-", ignore_cleanup_errors=True) as scratch:
            return run_cells(
                cells, LocalCells(self.room, processes, Path(scratch)), fresh=self.fresh, retries=self.retries,
                progress=self.progress, wait_s=self.wait_s,
            )  # fmt: skip


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


def plan_jobs(cores: int, jobs: int = 0) -> int:
    """How many cells at a time: what the user gives, else two less than there are cores."""
    return jobs or max(1, min(cores, 2), cores - 2)


def expect_need(order: Order, row: BridgeModule | ProbeCell) -> Need:
    """What a cell is expected to take, as the row of its bridge module, or its own, has it."""
    return Need(
        memory_mib=row.gpu_memory_mib + CONTEXT_MIB,
        seconds=row.seconds * (_ONLY_TIMES if order.only_times else 1.0),
        kernels=f"{order.stack}/{order.probe}" if row.compiles else "",
    )


def count_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def share_cores(variables: Mapping[str, str], jobs: int) -> dict[str, str]:
    """The user's variables; processes side by side share the cores, unless the user has decided that."""
    return {"OMP_NUM_THREADS": str(max(1, count_cores() // jobs)), **variables}


def read_room(variables: Mapping[str, str], *, gpu: bool, jobs: int, memory_mib: float = 0.0) -> Room:
    """What all cells together may take at a time.

    Args:
        variables: environment variables of the user, which choose the GPU.
        gpu: whether the cells run on one. Where nvidia-smi does not know its memory, as of a GPU that shares the memory
            of the host ("[N/A]"), cells run one at a time.
        jobs: what the user gives; 0 for what suits the cores: importing torch and a vendor library takes one for 8
            seconds a cell, and two are left to the tool and the system.
        memory_mib: what the user gives; 0 for what is free now, less a reserve.
    """
    at_once = plan_jobs(count_cores(), jobs)
    if not gpu or memory_mib:
        return Room(at_once, memory_mib or None)
    first = variables.get(VISIBLE, "").split(",")[0].strip() or "0"
    try:
        total, free = (float(text) for text in _ask_smi("memory.total,memory.free", variables, f"--id={first}")[0])
    except (LookupError, ValueError):
        return Room(jobs=1)
    return Room(at_once, max(0.0, free - RESERVE * total))


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
    return [[column.strip() for column in row.split(",")] for row in rows if row.strip()]
