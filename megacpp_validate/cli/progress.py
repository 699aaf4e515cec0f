"""How far a run is: a line of what runs, where a person looks on, and a line for each that has ended, everywhere."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.status import Status

errors = Console(stderr=True, highlight=False, soft_wrap=True)
_MOST_NAMED = 6


@dataclass
class Progress:
    """The two, on standard error; what is to be said of whom is for those that build on it."""

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
        self.console.print(line, markup=False)

    def show(self, count: str, running: Collection[str]) -> None:
        """What runs now, the first of it by name."""
        if self._status is not None and running:
            named = list(running)
            more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
            self._status.update(f"{count}running: {', '.join(named[:_MOST_NAMED])}{more}")
