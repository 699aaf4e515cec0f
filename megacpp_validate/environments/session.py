"""A session: the cells of one environment side by side; each ends in a receipt, whatever happens to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..evidence.receipt import Receipt
from ..probes.order import Order
from ..process import Processes
from .cell import Cell
from .environment import Environment
from .fleet import Event, Fleet
from .schedule import Need, Room

Progress = Callable[[str, Receipt | None], None]
"""Called with a cell when it starts (None) and when it has ended, from one thread."""


@dataclass(frozen=True)
class Expected:
    """What a cell is known to take: seconds, and the seconds that it is given at least."""

    seconds: float = 0.0
    limit_s: float = 0.0


@dataclass(frozen=True)
class Session:
    """How the cells of a session are run.

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
        progress: Progress = lambda *_: None,
        expected: Mapping[str, Expected] | None = None,
    ) -> tuple[Receipt, ...]:
        """Run every order, the longest first; receipts in the order of the orders.

        Args:
            orders: the cells.
            processes: that theirs are among.
            progress: told what becomes of each.
            expected: by probe, what it is known to take.

        Raises:
            OSError: the folder cannot be written.
            Stopped: everything was stopped.
        """

        def told(event: Event) -> None:
            progress(event.cell.order.cell, event.receipt)

        self.folder.mkdir(parents=True, exist_ok=True)
        rows = expected or {}
        cells = []
        for order in orders:
            row = rows.get(order.probe, Expected())
            limit = max(self.limit_s, row.limit_s)
            cells.append((Cell(self.environment, order, self.folder, limit), Need(0.0, row.seconds)))
        ended = Fleet(Room(max(1, self.jobs)), progress=told).run(cells, processes)
        return tuple(receipt for receipt, _ in ended)
