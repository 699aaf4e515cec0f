"""The cells of a store: which receipt of a cell counts, and what puts it in doubt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from packaging.version import Version

from ...evidence.history import CellHistory, HistoryRow
from ...evidence.receipt import Outcome, read_time
from ...evidence.values import read_version
from ..marks import Mark, mark_of, missing

_LONGEST: Final = 60

Grid = dict[tuple[str, str], dict[str, "Cell"]]
"""(target, stack) -> probe -> cell."""


@dataclass(frozen=True)
class Cell:
    """The receipts of one cell.

    Attributes:
        row: the receipt that counts: the newest, and of two from one moment the one that is not good.
        rows: all of them, invalid files too.
        doubt: why that receipt does not settle what the cell does; empty where it does.
        fault: why its file cannot be read.
    """

    row: HistoryRow
    rows: tuple[HistoryRow, ...]
    doubt: str = ""
    fault: str = ""

    @property
    def name(self) -> str:
        """The id of the cell."""
        return self.row.cell

    @property
    def page(self) -> str:
        """Where the cell is shown, below the folder of the report."""
        return name_page("cell", self.name)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the receipt that counts; not run where it cannot be read."""
        return Outcome.NOT_RUN if self.fault or self.row.outcome is None else self.row.outcome

    @property
    def holds(self) -> bool:
        """Whether there is evidence that the cell holds, and no other receipt contradicts it."""
        return self.outcome.is_good and not self.doubt

    @property
    def mark(self) -> Mark:
        """The outcome and the doubt; a doubt is never good."""
        return mark_cell(self.outcome, self.doubt)


def mark_cell(outcome: Outcome, doubt: str) -> Mark:
    """The outcome and the doubt of a cell: what is in doubt is no evidence."""
    mark = mark_of(outcome)
    if not doubt:
        return mark
    word = f"{mark.word}, {doubt}"
    return missing(word) if outcome.is_good else replace(mark, word=word)


def arrange_cells(histories: Iterable[CellHistory]) -> Grid:
    """Cells by target and stack: on each target Transformer Engine first, the newest release first."""
    grid: Grid = {}
    for history in histories:
        valid = [row for row in history.rows if row.outcome is not None]
        if valid:  # a file that is no receipt and stands alone is of no stack that is known
            row = max(valid, key=lambda one: (not one.only_timed, _at(one), not _is_good(one)))
            cell = Cell(row, history.rows, _find_doubt(row, history.rows))
            grid.setdefault((row.target, row.stack), {})[row.probe] = cell
    newest_first = sorted(grid, key=lambda key: _release_of(key[1]), reverse=True)
    return {key: grid[key] for key in sorted(newest_first, key=lambda key: (key[0], family(key[1]) != "te"))}


def family(stack: str) -> str:
    """The part of a stack before its release: "te" of "te2.20.2", all of "native"."""
    return re.split(r"\d", stack, maxsplit=1)[0]


def name_page(folder: str, name: str) -> str:
    """A page's path that a person recognises; its hash differs for all other names, whatever the file system."""
    digest = sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:10]
    shown = re.sub(r"[^a-z0-9._]+|\.{2,}", "-", name.lower())[:_LONGEST].strip("-._")
    return f"{folder}/{shown}-{digest}.html"


def _find_doubt(newest: HistoryRow, rows: Iterable[HistoryRow]) -> str:
    """Why the newest receipt does not settle what the cell does: another one may be newer, and is not good."""
    others = [row for row in rows if row is not newest]
    if not _is_good(newest):
        return ""
    if any(row.outcome is None for row in others):
        return "file lost"
    if any(not _is_good(row) and math.isinf(_at(row)) for row in others):
        return "another receipt is red"
    return ""


def _is_good(row: HistoryRow) -> bool:
    return row.outcome is not None and row.outcome.is_good


def _at(row: HistoryRow) -> float:
    """Seconds since 1970; minus infinity where the time is unknown."""
    return -math.inf if (moment := read_time(row.started)) is None else moment.timestamp()


def _release_of(stack: str) -> Version:
    """The release that a stack names; of a name that is no version, the numbers that it begins with."""
    name = stack.removeprefix(family(stack))
    beginning = re.match(r"\d{1,9}(\.\d{1,9})*", name)
    return read_version(name) or Version(beginning[0] if beginning else "0")
