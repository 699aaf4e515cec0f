"""The cells of a store: which receipt of a cell counts, and what puts it in doubt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from packaging.version import Version
from pydantic import Field

from ...evidence.history import HistoryRow
from ...evidence.receipt import Outcome, read_time
from ...evidence.values import read_version
from ..marks import Mark, mark_of, missing

LOST: Final = "file lost"


class Cell(HistoryRow):
    """The receipts of one cell, and the one that counts: the newest, and of two from one moment the one that is red.

    Attributes:
        outcome: of that receipt; not run where it cannot be read.
        page: where the cell is shown, below the folder of the report.
        doubt: why a good outcome is no evidence that the cell holds; empty where it is.
        rows: every receipt of the cell, invalid files too.
    """

    outcome: Outcome
    page: str
    doubt: str = ""
    rows: tuple[HistoryRow, ...] = Field(default=(), exclude=True)

    @property
    def holds(self) -> bool:
        """Whether there is evidence that the cell holds, and no other receipt contradicts it."""
        return self.outcome.is_good and not self.doubt

    @property
    def mark(self) -> Mark:
        """The outcome and the doubt; what is in doubt is never good."""
        mark = mark_of(self.outcome)
        if not self.doubt:
            return mark
        word = f"{mark.word}, {self.doubt}"
        return missing(word) if self.outcome.is_good else replace(mark, word=word)


def arrange_cells(histories: Iterable[Sequence[HistoryRow]]) -> list[Cell]:
    """Cells by target and stack: on each target Transformer Engine first, the newest release first."""
    cells = [_read_cell(rows) for rows in histories if any(row.outcome for row in rows)]
    cells.sort(key=lambda cell: (_release_of(cell.stack), cell.stack), reverse=True)
    return sorted(cells, key=lambda cell: (cell.target, family(cell.stack) != "te"))


def family(stack: str) -> str:
    """The part of a stack before its release: "te" of "te2.20.2", all of "native"."""
    return re.split(r"\d", stack, maxsplit=1)[0]


def _read_cell(rows: Sequence[HistoryRow]) -> Cell:
    valid = [(row, row.outcome) for row in rows if row.outcome is not None]
    row, outcome = max(valid, key=lambda one: (not one[0].only_timed, _at(one[0]), not one[1].is_good))
    doubt = ""
    if outcome.is_good and len(valid) < len(rows):
        doubt = LOST
    elif outcome.is_good and any(not other.is_good and math.isinf(_at(one)) for one, other in valid):
        doubt = "another receipt is red"
    page = f"cell/{row.cell}.html"
    return Cell.model_construct(**{**dict(row), "outcome": outcome, "page": page, "doubt": doubt, "rows": tuple(rows)})


def _at(row: HistoryRow) -> float:
    """Seconds since 1970; minus infinity where the time is unknown."""
    return -math.inf if (moment := read_time(row.started)) is None else moment.timestamp()


def _release_of(stack: str) -> Version:
    """The release that a stack names; of a name that is no version, the numbers that it begins with."""
    name = stack.removeprefix(family(stack))
    beginning = re.match(r"\d{1,9}(\.\d{1,9})*", name)
    return read_version(name) or Version(beginning[0] if beginning else "0")
