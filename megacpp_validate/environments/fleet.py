"""Many cells side by side, of one environment or of many, within the cores, the GPUs and the memory that there are.

No cell can touch another: each has a process, a working folder and a log of its own. Cells that share a device take
turns on it by a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..evidence.receipt import Receipt, write_receipt
from ..probes.order import Order
from ..process import Processes
from .cell import Cell
from .container import ContainerEnvironment
from .environment import Environment
from .interpreter import InterpreterEnvironment
from .restart import find_done, find_fault, receipt_of_given_up
from .schedule import RAN_WHOLE, VISIBLE, Need, Room, choose_next, order_longest_first


@dataclass(frozen=True)
class Event:
    """Something that became of a cell.

    Attributes:
        cell: which one.
        receipt: None where it starts now, or is to be run again.
        reused: the receipt is of an earlier run.
        done, total: cells of the run that have ended, and all.
        note: where it runs, or the infrastructure fault that ended it.
    """

    cell: Cell
    receipt: Receipt | None
    reused: bool
    done: int
    total: int
    note: str = ""


Progress = Callable[[Event], None]
"""Called from the thread that runs the cells."""


@dataclass(frozen=True)
class Fleet:
    """How cells are run.

    Attributes:
        room: what all of them may take at a time.
        fresh: run again what an earlier run has a receipt of.
        progress: called with what becomes of each cell.
        retries: of one cell, after infrastructure faults.
    """

    room: Room
    fresh: bool = True
    progress: Progress = lambda _: None
    retries: int = 0

    def run(self, cells: Sequence[tuple[Cell, Need]], processes: Processes) -> tuple[tuple[Receipt, bool], ...]:
        """Run every cell, or take its receipt where that answers its order.

        Args:
            cells: with what each is expected to take.
            processes: that the cells' processes are among.

        Returns:
            A receipt for each, in their order, and whether it is of an earlier run.

        Raises:
            OSError: a folder cannot be written.
            Stopped: everything was stopped.
        """
        run = _Run(self, cells)
        for index, (cell, _) in enumerate(cells):
            receipt = None if self.fresh else find_done(cell.order, cell.place)
            if receipt is not None:
                run.end(index, receipt, reused=True)
        missing = [index for index in range(len(cells)) if index not in run.ended]
        for index in missing:
            cells[index][0].folder.mkdir(parents=True, exist_ok=True)
        run.waiting = [missing[place] for place in order_longest_first([cells[index][1] for index in missing])]
        with (
            tempfile.TemporaryDirectory(prefix="megacpp-") as scratch,
            ThreadPoolExecutor(max_workers=max(1, self.room.jobs)) as pool,
        ):
            try:
                while run.waiting or run.running:
                    for index, cell in run.take():
                        work = Path(scratch, f"{index}.{len(run.faults.get(index, ()))}")
                        run.running[pool.submit(cell.run, work, processes)] = index
                    over, _ = wait(run.running, return_when=FIRST_COMPLETED)
                    for future in over:
                        run.settle(run.running.pop(future), future.result())
            except BaseException:  # an interrupt too: nothing may keep running behind it
                processes.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return tuple(run.ended[index] for index in range(len(cells)))


@dataclass
class _Run:
    """One run of a fleet: cells by their index, and what became of them."""

    fleet: Fleet
    cells: Sequence[tuple[Cell, Need]]
    waiting: list[int] = field(default_factory=list)
    running: dict[Future[Receipt], int] = field(default_factory=dict)
    gpus: dict[int, tuple[str, ...]] = field(default_factory=dict)
    compiled: set[str] = field(default_factory=set)
    faults: dict[int, list[str]] = field(default_factory=dict)
    ended: dict[int, tuple[Receipt, bool]] = field(default_factory=dict)

    def take(self) -> Iterator[tuple[int, Cell]]:
        """The cells that are to be started now, each on GPUs of its own where it needs them."""
        while True:
            needs = [self.cells[index][1] for index in self.waiting]
            beside = [self.cells[index][1] for index in self.running.values()]
            chosen = choose_next(needs, beside, self.fleet.room, self.compiled)
            if chosen is None:
                return
            index = self.waiting.pop(chosen)
            cell, need = self.cells[index]
            self._report(cell, None)
            if need.gpus:
                taken = {name for other in self.running.values() for name in self.gpus.get(other, ())}
                free = [name for name in self.fleet.room.gpus if name not in taken]
                self.gpus[index] = tuple(free[: need.gpus])
                cell = replace(cell, environment=_on_gpus(cell.environment, self.gpus[index]))
            yield index, cell

    def settle(self, index: int, receipt: Receipt) -> None:
        """End a cell, or run it again after an infrastructure fault."""
        cell, need = self.cells[index]
        if receipt.outcome in RAN_WHOLE:
            self.compiled.add(need.kernels)
        fault = find_fault(receipt) if self.fleet.retries else ""
        faults = self.faults.setdefault(index, [])
        faults += [fault] if fault else []
        if fault and len(faults) <= self.fleet.retries:
            self.waiting.insert(0, index)
            self._report(cell, None, note=fault)
            return
        if faults:
            receipt = receipt_of_given_up(cell.order, faults) if fault else replace(receipt, retries=tuple(faults))
            write_receipt(receipt, cell.place)
        self.end(index, receipt)

    def end(self, index: int, receipt: Receipt, *, reused: bool = False) -> None:
        """Take note of a cell's receipt."""
        self.ended[index] = receipt, reused
        self._report(self.cells[index][0], receipt, reused=reused)

    def _report(self, cell: Cell, receipt: Receipt | None, *, reused: bool = False, note: str = "") -> None:
        self.fleet.progress(Event(cell, receipt, reused, len(self.ended), len(self.cells), note))


def _on_gpus(environment: Environment, gpus: tuple[str, ...]) -> Environment:
    """The environment with these GPUs alone; the order keeps its identity, since any of them would do."""
    match environment:
        case InterpreterEnvironment() | ContainerEnvironment():
            return replace(environment, variables={**environment.variables, VISIBLE: ",".join(gpus)})
        case _:
            return environment


@dataclass(frozen=True)
class Expected:
    """What a cell is known to take: seconds, and the seconds that it is given at least."""

    seconds: float = 0.0
    limit_s: float = 0.0


@dataclass(frozen=True)
class Session:
    """The cells of one environment, run side by side; each ends in a receipt, whatever happens to it.

    Attributes:
        environment: where.
        folder: of the receipts; a cell's log lies beside its receipt.
        limit_s: seconds that one cell may take.
        jobs: cells at a time.
    """

    environment: Environment
    folder: Path
    limit_s: float
    jobs: int

    def run(
        self,
        orders: Sequence[Order],
        processes: Processes,
        progress: Callable[[str, Receipt | None], None] = lambda *_: None,
        expected: Mapping[str, Expected] | None = None,
    ) -> tuple[Receipt, ...]:
        """Run every order, the longest first; receipts in the order of the orders.

        Args:
            orders: the cells.
            processes: that theirs are among.
            progress: called with a cell when it starts (None) and when it has ended, from one thread.
            expected: by probe, what it is known to take.

        Raises:
            OSError: the folder cannot be written.
            Stopped: everything was stopped.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [(expected or {}).get(order.probe, Expected()) for order in orders]
        cells = [
            (Cell(self.environment, order, self.folder, max(self.limit_s, row.limit_s)), Need(0.0, row.seconds))
            for order, row in zip(orders, rows, strict=True)
        ]
        fleet = Fleet(Room(max(1, self.jobs)), progress=lambda event: progress(event.cell.order.cell, event.receipt))
        return tuple(receipt for receipt, _ in fleet.run(cells, processes))
