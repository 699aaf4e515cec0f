"""Many cells side by side, of one environment or of many, within the cores and the memory that there are.

No cell can touch another: each has a process, a working folder and a log of its own. What they share is the device,
and the file by which they take turns on it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ..evidence.receipt import Receipt
from ..process import Processes
from .cell import Cell
from .restart import find_done
from .schedule import RAN_WHOLE, Need, Room, choose_next, order_longest_first


@dataclass(frozen=True)
class Event:
    """Something that became of a cell.

    Attributes:
        cell: which one.
        receipt: None where it starts now.
        reused: the receipt is of an earlier run.
        done, total: cells of the run that have ended, and all.
    """

    cell: Cell
    receipt: Receipt | None
    reused: bool
    done: int
    total: int


Progress = Callable[[Event], None]
"""Called from the thread that runs the fleet."""


@dataclass(frozen=True)
class Fleet:
    """How cells are run.

    Attributes:
        room: what all of them may take at a time.
        fresh: run again what an earlier run has a receipt of.
        progress: told what becomes of each cell.
    """

    room: Room
    fresh: bool = True
    progress: Progress = lambda _: None

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
        ended = self._take_done([cell for cell, _ in cells])
        missing = [index for index in range(len(cells)) if index not in ended]
        for index in missing:
            cells[index][0].folder.mkdir(parents=True, exist_ok=True)
            cells[index][0].forget()
        first = order_longest_first([cells[index][1] for index in missing])
        waiting = [missing[index] for index in first]
        running: dict[Future[Receipt], int] = {}
        compiled: set[str] = set()
        with (
            tempfile.TemporaryDirectory(prefix="megacpp-") as scratch,
            ThreadPoolExecutor(max_workers=max(1, self.room.jobs)) as pool,
        ):
            try:
                while waiting or running:
                    while (chosen := self._choose(cells, waiting, running, compiled)) is not None:
                        self._tell(cells[chosen][0], None, ended, len(cells))
                        work = Path(scratch, str(chosen))
                        running[pool.submit(cells[chosen][0].run, work, processes)] = chosen
                    over, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in over:
                        index = running.pop(future)
                        ended[index] = future.result(), False
                        if ended[index][0].outcome in RAN_WHOLE:
                            compiled.add(cells[index][1].kernels)
                        self._tell(cells[index][0], ended[index][0], ended, len(cells))
            except BaseException:  # an interrupt too: nothing may keep running behind it
                processes.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return tuple(ended[index] for index in range(len(cells)))

    def _take_done(self, cells: Sequence[Cell]) -> dict[int, tuple[Receipt, bool]]:
        ended: dict[int, tuple[Receipt, bool]] = {}
        for index, cell in enumerate(cells):
            receipt = None if self.fresh else find_done(cell.order, cell.place)
            if receipt is not None:
                ended[index] = receipt, True
                self._tell(cell, receipt, ended, len(cells), reused=True)
        return ended

    def _choose(
        self, cells: Sequence[tuple[Cell, Need]], waiting: list[int], running: dict[Future[Receipt], int],
        compiled: set[str],
    ) -> int | None:  # fmt: skip
        """Take the next cell from those that wait."""
        needs = [cells[index][1] for index in waiting]
        chosen = choose_next(needs, [cells[index][1] for index in running.values()], self.room, compiled)
        return None if chosen is None else waiting.pop(chosen)

    def _tell(
        self, cell: Cell, receipt: Receipt | None, ended: dict[int, tuple[Receipt, bool]], total: int, *,
        reused: bool = False,
    ) -> None:  # fmt: skip
        self.progress(Event(cell, receipt, reused, len(ended), total))
