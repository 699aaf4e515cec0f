"""Receipts of a store by target, stack and probe: which receipt of a cell counts, and what puts it in doubt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from packaging.version import InvalidVersion, Version

from megacpp_validate.evidence.receipt import Outcome

from ...environments.stacks import AGAIN
from ...evidence.history import HistoryRow
from ...evidence.receipt import read_time
from ..marks import Mark, mark_of, missing, risk

MOST_STACKS: Final = 20  # of one target whose cells have pages, and that stand on the first page: a cell takes 20 ms
_LONGEST: Final = 60

Grid = dict[tuple[str, str], dict[str, "CellHistory"]]
"""(target, stack) -> probe -> cell."""


@dataclass(frozen=True)
class CellHistory:
    """Every receipt of one cell.

    Attributes:
        page: where the cell is shown, below the folder of the report.
        rows: the receipt that counts comes first, then the others, the newest first.
        lost: files under the name of the cell that are invalid receipts.
        doubt: why the receipt that counts does not settle what the cell does; empty where it does.
        fault: why the newest receipt cannot be shown.
    """

    cell: str
    stack: str
    target: str
    probe: str
    page: str
    rows: tuple[HistoryRow, ...] = ()
    lost: tuple[str, ...] = ()
    doubt: str = ""
    fault: str = ""

    @property
    def has_page(self) -> bool:
        """Whether the cell has a page of its own."""
        return self.page.startswith("cell/")

    @property
    def outcome(self) -> Outcome:
        """The outcome of the receipt that counts; not run where it cannot be read."""
        return Outcome.NOT_RUN if self.fault or not self.rows else self.rows[0].outcome or Outcome.NOT_RUN

    @property
    def holds(self) -> bool:
        """Whether there is evidence that the cell holds, and no other receipt contradicts it."""
        return self.outcome.is_good and not self.doubt

    @property
    def mark(self) -> Mark:
        """The outcome and the doubt; a doubt is never good."""
        mark = mark_of(self.outcome)
        if not self.doubt:
            return mark
        if self.outcome is Outcome.NOT_RUN:
            return missing(self.doubt)
        word = f"{mark.word}, {self.doubt}"
        return risk(word) if self.outcome.is_good else Mark(mark.symbol, mark.letter, word, mark.tone)


def arrange_cells(rows: Sequence[HistoryRow], made_at: str, targets: Iterable[str] = ()) -> Grid:
    """Cells by target and stack: on each target Transformer Engine first, the newest release first.

    Args:
        rows: in any order, invalid receipts among them.
        made_at: the time of the report, ISO 8601.
        targets: of the matrix, which find the stack in the name of an invalid file.
    """
    known = {row.cell: (row.target, row.stack, row.probe) for row in rows if row.outcome is not None}
    names = "|".join(map(re.escape, sorted({*targets, *(key[0] for key in known.values())}, key=len, reverse=True)))
    found: dict[tuple[str, str], dict[str, list[HistoryRow]]] = {}
    for row in rows:
        if row.cell in known:
            target, stack, probe = known[row.cell]
        elif names and (named := re.fullmatch(f"(.+)-({names})-(.+)", row.cell)):
            stack, target, probe = named.groups()
        else:
            continue
        found.setdefault((target, stack), {}).setdefault(probe, []).append(row)
    newest_first = sorted(found, key=lambda key: _read_version(key[1]), reverse=True)
    ordered = sorted(newest_first, key=lambda key: (key[0], family(key[1]) != "te", family(key[1])))
    grid: Grid = {}
    for key in ordered:
        has_pages = sum(target == key[0] for target, _ in grid) < MOST_STACKS
        cells = (
            _make_cell((*key, probe), found[key][probe], _instant(made_at), has_pages) for probe in sorted(found[key])
        )
        grid[key] = {cell.probe: cell for cell in cells}
    return grid


def family(stack: str) -> str:
    """The part of a stack before its release: "te" of "te2.20.2", all of "native"."""
    return re.split(r"\d", stack, maxsplit=1)[0]


def name_page(folder: str, *words: str) -> str:
    """A page's path that a person recognises; its hash differs for all other words, whatever the file system."""
    digest = sha256("\0".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:10]
    shown = re.sub(r"[^a-z0-9._]+|\.{2,}", "-", "-".join(words).lower())[:_LONGEST].strip("-._")
    return f"{folder}/{shown}-{digest}.html" if shown else f"{folder}/{digest}.html"


def _make_cell(names: tuple[str, str, str], rows: Sequence[HistoryRow], now: float, has_page: bool) -> CellHistory:
    def rank(row: HistoryRow) -> tuple[bool, bool, float, bool, bool, str]:
        # Of two from one moment the one that is not good: which folder's name comes later is no reason.
        return not _is_again(row), _at(row) <= now, _at(row), not _is_good(row), not row.same_as, row.run

    target, stack, probe = names
    valid = sorted((row for row in rows if row.outcome is not None), key=rank, reverse=True)
    lost = tuple(row.path for row in rows if row.outcome is None)
    page = name_page("cell", rows[0].cell) if has_page else name_page("target", target)
    doubt = _find_doubt(valid, lost, now)
    return CellHistory(rows[0].cell, stack, target, probe, page, tuple(valid), lost, doubt)


def _find_doubt(rows: Sequence[HistoryRow], lost: Sequence[str], now: float) -> str:
    """Why the first receipt does not settle what the cell does: another one may be newer, and is not good."""
    if not rows:
        return "file lost"
    newest = rows[0]
    if newest.contradicts:
        return "contradicted"
    if not _is_good(newest):
        return ""
    if lost:
        return "file lost"
    bad = [row for row in rows[1:] if not _is_good(row)]
    if max(map(_at, [newest, *bad])) > now:
        return "clock ahead"
    again = {f"{newest.run}/{AGAIN}", AGAIN if newest.run == "." else ""}
    late = any(_at(row) >= _at(newest) or row.run in again or math.isinf(_at(row)) for row in bad)
    return "another receipt is red" if late else ""


def _is_good(row: HistoryRow) -> bool:
    return row.outcome is not None and row.outcome.is_good


def _is_again(row: HistoryRow) -> bool:
    """Whether a receipt is of a second run, made for its times alone: it replaces none with all checks."""
    return row.only_timed or row.run.rpartition("/")[2] == AGAIN


def _at(row: HistoryRow) -> float:
    return _instant(row.started)


def _instant(text: str) -> float:
    """Seconds since 1970; minus infinity where the time is unknown."""
    return -math.inf if (moment := read_time(text)) is None else moment.timestamp()


def _read_version(stack: str) -> tuple[Version, str]:
    """The release that a stack names; of a name that is no version, the numbers that it begins with."""
    name = stack.removeprefix(family(stack))
    try:
        return Version(name), ""
    except (InvalidVersion, ValueError):
        numbers = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", name)
        return Version(numbers[0] if numbers else "0"), name
