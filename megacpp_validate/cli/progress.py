"""How far a run is, on standard error: a bar on a terminal, and everywhere a line for each thing that has ended."""

from __future__ import annotations

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
    """Lines, and a bar where standard error is a terminal. Its methods are what sessions and engines call."""

    def __init__(self) -> None:
        self._running: dict[str, None] = {}
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

    @property
    def callbacks(self) -> upgrade.Progress:
        """What the canary calls."""
        from ..canary import upgrade

        return upgrade.Progress(self._end_pair, self._end_case, self.show_event, self.say)

    def say(self, line: str) -> None:
        """A line that stays. A run goes on where nobody reads its lines: `Console.print` would end the run."""
        with suppress(OSError):
            if errors.is_terminal:
                errors.print(clean(line), markup=False)
            else:
                errors.file.write(clean(line) + "\n")
                errors.file.flush()

    def show_cell(self, cell: str, receipt: Receipt | None, opening: str = "", took: str = "") -> None:
        """A cell that starts (None) or has ended."""
        if receipt is None:
            self._running[cell] = None
        else:
            self._running.pop(cell, None)
            took = took or f"{receipt.seconds.get('total', 0.0):.1f} s"
            self.say(f"{opening}{receipt.outcome.value:12} {cell} ({took})")
        names = list(self._running)
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        self._bar.update(self._task, description=f"running: {', '.join(names[:_MOST_NAMED])}{more}")

    def show_event(self, event: Event) -> None:
        """What became of a cell of a fleet."""
        order, count = event.cell.order, f"{event.done}/{event.total}"
        name = f"{order.cell}{', again' if order.only_times else ''}"
        if event.receipt is None and ": " in event.note:  # an infrastructure fault, after which the cell runs again
            self.say(f"{count:>7} {'again':12} {name}: {event.note}")
        self._bar.update(self._task, completed=event.done, total=event.total)
        self.show_cell(name, event.receipt, f"{count:>7} ", "kept" if event.reused else "")

    def _end_pair(self, line: str, done: int, total: int) -> None:
        if not errors.is_terminal:
            self.say(f"{done}/{total} {line}")
        self._bar.update(self._task, completed=done, total=total, description=line)

    def _end_case(self, case: FirewallCase) -> None:
        self.say(f"{case.outcome.value:8} {case.case} ({case.seconds:.1f} s)")
