"""How far the canary is, on standard error: a bar on a terminal, elsewhere a line for each thing that ended."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self

from .progress import errors

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ..canary.firewall.result import FirewallCase
    from ..canary.upgrade import Progress
    from ..environments.fleet import Event


class ShownProgress:
    """A bar or lines; `callbacks` are what an engine calls."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._running: dict[str, None] = {}

    def __enter__(self) -> Self:
        if errors.is_terminal:
            from rich import progress

            columns = (
                progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn(),
                progress.TextColumn("{task.description}", markup=False),
            )  # fmt: skip
            self._bar = progress.Progress(*columns, console=errors, transient=True)
            self._bar.add_task("starting", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def callbacks(self) -> Progress:
        """What the canary calls."""
        from ..canary.upgrade import Progress

        return Progress(self.show, self._show_case, self._show_cell, self._print)

    def show(self, line: str, done: int, total: int) -> None:
        """Something ended: the bar goes on, or a line is written."""
        if self._bar is None:
            self._print(f"{done}/{total} {line}")
        else:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=line)

    def _show_case(self, case: FirewallCase) -> None:
        self._print(f"{case.outcome.value:8} {case.case} ({case.seconds:.1f} s)")

    def _show_cell(self, event: Event) -> None:
        order, receipt = event.cell.order, event.receipt
        name = f"{order.cell}{', again' if order.only_times else ''}"
        if receipt is None:
            self._running[name] = None
        else:
            self._running.pop(name, None)
            took = "kept" if event.reused else f"{receipt.seconds.get('total', 0.0):.1f} s"
            self._print(f"{f'{event.done}/{event.total}':>7} {receipt.outcome.value:12} {name} ({took})")
        if self._bar is not None:
            self.show(f"running: {', '.join(self._running)}"[:100], event.done, event.total)

    def _print(self, line: str) -> None:
        # Where nobody reads on or the terminal has hung up, the run goes on; `Console.print` would end it.
        with suppress(OSError):
            if self._bar is None:
                errors.file.write(line + "\n")
                errors.file.flush()
            else:
                errors.print(line, markup=False)
