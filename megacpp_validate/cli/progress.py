"""How far a run is: on a terminal a status line of what runs, and everywhere a line for each cell that has ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.status import Status

from ..text import clean

if TYPE_CHECKING:
    from ..evidence.receipt import Receipt

errors = Console(stderr=True, highlight=False, soft_wrap=True)
_MOST_NAMED = 6


@dataclass
class Progress:
    """Both lines, on standard error."""

    console: Console = field(default_factory=lambda: errors)
    _status: Status | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._status = self.console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(clean(line), markup=False)

    def show(self, count: str, running: Collection[str]) -> None:
        """Show what runs now, the first few by name."""
        if self._status is not None and running:
            named = list(running)
            more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
            self._status.update(f"{count}running: {', '.join(named[:_MOST_NAMED])}{more}")


@dataclass
class CellProgress(Progress):
    """Cells of a session: called with a cell when it starts (None) and when it has ended."""

    running: dict[str, None] = field(default_factory=dict)

    def __call__(self, cell: str, receipt: Receipt | None) -> None:
        """Take note of what became of a cell."""
        if receipt is None:
            self.running[cell] = None
        else:
            self.running.pop(cell, None)
            self.say(f"{receipt.outcome.value:12} {cell} ({receipt.seconds.get('total', 0.0):.1f} s)")
        self.show("", self.running)
