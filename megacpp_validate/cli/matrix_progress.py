"""What becomes of many cells: what runs, where a person looks on; a line for each that has ended, everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status

from ..environments.fanout.events import Told
from ..report.ink import plain
from ..report.marks import mark_cell
from .app import errors

_MOST_NAMED = 6


@dataclass
class MatrixProgress:
    """Jobs on their way, and cells that have ended."""

    console: Console = field(default_factory=lambda: errors)
    _on_their_way: dict[str, str] = field(default_factory=dict)
    _status: Status | None = None

    def __enter__(self) -> MatrixProgress:
        if self.console.is_terminal:
            self._status = self.console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, told: Told) -> None:
        """Take note of what became of a cell."""
        if told.what in ("ended", "kept"):
            self._on_their_way.pop(told.cell, None)
        elif told.cell:
            self._on_their_way[told.cell] = told.what
        if line := _line(told):
            self.console.print(plain(line), markup=False)
        if self._status is not None:
            named = list(self._on_their_way)
            more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
            self._status.update(f"{told.done}/{told.total}; {', '.join(named[:_MOST_NAMED])}{more}")


def _line(told: Told) -> str:
    count = f"{told.done}/{told.total}"
    if told.receipt is not None:
        word = mark_cell(told.receipt.outcome).word
        seconds = told.receipt.seconds.get("total", 0.0)
        where = f", {told.says}" if told.says else ""
        again = f", again {len(told.receipt.retries)}x" if told.receipt.retries else ""
        took = "kept" if told.what == "kept" else f"{seconds:.1f} s{where}{again}"
        return f"{count:>7} {word:12} {told.cell} ({took})"
    match told.what:
        case "found":
            return f"{count:>7} {'on its way':12} {told.cell} (job {told.says or 'not numbered yet'})"
        case "again":
            return f"{count:>7} {'again':12} {told.cell}: {told.says}"
        case "held":
            return f"{count:>7} {'held':12} {told.cell}: {told.says}"
        case "silent":
            return f"{count:>7} {'waiting':12} {told.says}"
        case _:
            return ""  # given and running: told where a person looks on
