"""How far a run is, on standard error: a bar on a terminal, and everywhere a line for each thing that has ended."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ..text import clean

if TYPE_CHECKING:
    from ..canary import upgrade
    from ..canary.firewall.result import FirewallCase
    from ..environments.fleet import Event
    from ..evidence.receipt import Receipt

errors = Console(stderr=True, highlight=False, soft_wrap=True)
_MOST_NAMED = 6


class Progress:
    """Lines, and a bar where standard error is a terminal."""

    def __init__(self) -> None:
        self.running: dict[str, None] = {}
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Bar(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """A line that stays. Where nobody reads on, the run goes on: `Console.print` would end it."""
        with suppress(OSError):
            if errors.is_terminal:
                errors.print(clean(line), markup=False)
            else:
                errors.file.write(clean(line) + "\n")
                errors.file.flush()

    def show(self, count: str, running: Collection[str]) -> None:
        """Show what runs now, the first few by name."""
        more = f" and {len(running) - _MOST_NAMED} more" if len(running) > _MOST_NAMED else ""
        self._bar.update(self._task, description=f"{count}running: {', '.join(list(running)[:_MOST_NAMED])}{more}")


class CellProgress(Progress):
    """Cells of a session: called with a cell when it starts (None) and when it has ended."""

    def __call__(self, cell: str, receipt: Receipt | None) -> None:
        """Take note of what became of a cell."""
        if receipt is None:
            self.running[cell] = None
        else:
            self.running.pop(cell, None)
            self.say(f"{receipt.outcome.value:12} {cell} ({receipt.seconds.get('total', 0.0):.1f} s)")
        self.show("", self.running)


class ShownProgress(Progress):
    """How far the canary is; `callbacks` are what an engine calls."""

    @property
    def callbacks(self) -> upgrade.Progress:
        """What the canary calls."""
        from ..canary import upgrade

        return upgrade.Progress(self._end_pair, self._end_case, self._show_cell, self.say)

    def _end_pair(self, line: str, done: int, total: int) -> None:
        if not errors.is_terminal:
            self.say(f"{done}/{total} {line}")
        self._bar.update(self._task, completed=done, total=total, description=line)

    def _end_case(self, case: FirewallCase) -> None:
        self.say(f"{case.outcome.value:8} {case.case} ({case.seconds:.1f} s)")

    def _show_cell(self, event: Event) -> None:
        order, receipt = event.cell.order, event.receipt
        name = f"{order.cell}{', again' if order.only_times else ''}"
        if receipt is None:
            self.running[name] = None
        else:
            self.running.pop(name, None)
            took = "kept" if event.reused else f"{receipt.seconds.get('total', 0.0):.1f} s"
            self.say(f"{f'{event.done}/{event.total}':>7} {receipt.outcome.value:12} {name} ({took})")
        self._bar.update(self._task, completed=event.done, total=event.total)
        self.show("", self.running)
