"""How the verbs of the canary tell a result."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...report.results import Result
from ..app import Format
from ..telling import tell


class Telling(NamedTuple):
    """In which form, where, and how much of it a result is told."""

    fmt: Format
    output: Path | None
    verbose: bool = False

    def __call__(self, result: Result) -> None:
        """Tell it."""
        tell(result, self.fmt, self.output, verbose=self.verbose)
