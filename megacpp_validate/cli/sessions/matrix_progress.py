"""What becomes of many cells: what runs, where a person looks on; a line for each that has ended, everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...environments.fanout.events import Told
from ...report.ink import plain
from ...report.marks import mark_cell
from ..progress import Progress


@dataclass
class MatrixProgress(Progress):
    """Jobs on their way, and cells that have ended."""

    _on_their_way: dict[str, str] = field(default_factory=dict)

    def __call__(self, told: Told) -> None:
        """Take note of what became of a cell."""
        if told.what in ("ended", "kept"):
            self._on_their_way.pop(told.cell, None)
        elif told.cell:
            self._on_their_way[told.cell] = told.what
        if line := _line(told):
            self.say(plain(line))
        self.show(f"{told.done}/{told.total}; ", self._on_their_way)


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
