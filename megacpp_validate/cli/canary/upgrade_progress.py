"""What runs now: a live table where a person looks on, a line for each cell that has ended everywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...environments.fleet import Event
from ...evidence.receipt import Receipt
from ...probes.order import Order
from ...report.marks import mark_cell
from ..app import errors

_PER_SECOND = 2
_TONES = {"good": "green", "bad": "red", "risk": "yellow", "quiet": "dim"}


@dataclass
class UpgradeProgress:
    """Stacks x modules, as far as they came.

    Attributes:
        modules: the columns.
        stacks: rows that are there from the start; others come with their first cell.
        console: standard error.
    """

    modules: Sequence[str]
    stacks: Sequence[str] = ()
    console: Console = field(default_factory=lambda: errors)
    _rows: dict[str, dict[str, float | tuple[Receipt, bool]]] = field(default_factory=dict)
    _counts: tuple[int, int] = (0, 0)
    _live: Live | None = None

    def __post_init__(self) -> None:
        self._rows = {stack: {} for stack in self.stacks}

    def __enter__(self) -> UpgradeProgress:
        if self.console.is_terminal:
            self._live = Live(
                console=self.console, get_renderable=self.table, refresh_per_second=_PER_SECOND, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take note of what became of a cell."""
        order = event.cell.order
        self._counts = event.done, event.total
        state = time.monotonic() if event.receipt is None else (event.receipt, event.reused)
        self._rows.setdefault(_row_of(order), {})[order.probe] = state
        if event.receipt is not None and self._live is None:
            # Where nobody reads on or the terminal has hung up, the run goes on; `Console.print` would end it.
            with suppress(OSError):
                self.console.file.write(_line(event, event.receipt) + "\n")
                self.console.file.flush()

    def table(self) -> Table:
        """What is known now; what runs shows for how long."""
        done, total = self._counts
        table = Table(title=f"{done}/{total} cells", title_justify="left", show_edge=False, box=None, padding=(0, 1))
        table.add_column("stack")
        for module in self.modules:
            table.add_column(module)
        for row, cells in list(self._rows.items()):
            table.add_row(row, *(_draw(cells.get(module)) for module in self.modules))
        return table


def _row_of(order: Order) -> str:
    return f"{order.stack} again" if order.only_times else order.stack


def _line(event: Event, receipt: Receipt) -> str:
    word = mark_cell(receipt.outcome).word
    took = "kept" if event.reused else f"{receipt.seconds.get('total', 0.0):.1f} s"
    again = ", again" if event.cell.order.only_times else ""
    count = f"{event.done}/{event.total}"
    return f"{count:>7} {word:12} {receipt.cell}{again} ({took})"


def _draw(state: float | tuple[Receipt, bool] | None) -> Text:
    if state is None:
        return Text("waits", "dim")
    if isinstance(state, float):
        return Text(f"{time.monotonic() - state:.0f} s ...", "bold")
    receipt, reused = state
    mark = mark_cell(receipt.outcome)
    return Text(f"{mark.word}{' (kept)' if reused else ''}", _TONES[mark.tone])
