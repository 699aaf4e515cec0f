"""Receipts of a store by target, stack and cell: which one counts, and what puts it in doubt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from packaging.version import InvalidVersion, Version

from megacpp_validate.evidence.receipt import Outcome

from ...environments.stacks import AGAIN
from ...evidence.history import HistoryRow
from ...evidence.receipt import read_time
from ..describe.receipt import MARKS
from ..document import Mark, missing, risk

MOST_PAGES: Final = 300  # cells with a page of their own: one takes 20 ms and 100 kB
FILE_LOST: Final = missing("file lost")


@dataclass(frozen=True)
class CellHistory:
    """Every receipt of one cell.

    Attributes:
        rows: the newest first; a receipt whose clock is ahead of the report's comes last, it can outdate nothing.
        future: those receipts.
        unreadable: files under the name of the cell that are no receipts; the newest evidence may be one of them.
        fault: why the newest receipt cannot be shown; empty where it can.
    """

    cell: str
    stack: str
    target: str
    probe: str
    rows: tuple[HistoryRow, ...] = ()
    future: tuple[HistoryRow, ...] = ()
    unreadable: tuple[str, ...] = ()
    fault: str = ""

    @property
    def lost(self) -> bool:
        """Whether there is no receipt that can be read."""
        return not self.rows or bool(self.fault)

    @property
    def outcome(self) -> Outcome:
        """What the newest receipt says."""
        return Outcome.NOT_RUN if self.lost else self.rows[0].outcome or Outcome.NOT_RUN

    @property
    def doubt(self) -> str:
        """Why the newest receipt does not settle what becomes of the cell; empty where it does.

        Another receipt of the cell may say more than the one that counts, and that is never hidden.
        """
        if self.lost:
            return FILE_LOST.word
        newest = self.rows[0]
        if newest.contradicts:
            return "contradicted"
        if not self.outcome.is_good:
            return ""
        if self.unreadable:
            return FILE_LOST.word
        if newest in self.future or any(map(_is_bad, self.future)):
            return "clock ahead"
        bad = [row for row in self.rows[1:] if _is_bad(row)]
        again = [row for row in bad if _is_again(row)]
        if any(_at(row) > _at(newest) or _first_run(row) == newest.run for row in again):
            return "red when timed again"
        return "red without a date" if any(_at(row) == -math.inf for row in bad) else ""

    @property
    def holds(self) -> bool:
        """Whether there is evidence that the cell holds, and nothing that says otherwise since."""
        return self.outcome.is_good and not self.doubt

    @property
    def mark(self) -> Mark:
        """How the cell looks; a doubt is never good."""
        if self.lost:
            return FILE_LOST
        mark = MARKS[self.outcome]
        if not self.doubt:
            return mark
        word = f"{mark.word}, {self.doubt}"
        return risk(word) if self.outcome.is_good else replace(mark, word=word)


@dataclass(frozen=True)
class StackHistory:
    """Every cell of one stack on one target, by probe."""

    target: str
    stack: str
    cells: Mapping[str, CellHistory]

    def holds(self, modules: Iterable[str]) -> bool:
        """Whether every one of these cells holds."""
        return all(module in self.cells and self.cells[module].holds for module in modules)


def arrange_stacks(rows: Iterable[HistoryRow], made_at: str, targets: Iterable[str] = ()) -> tuple[StackHistory, ...]:
    """Rows by target, stack and probe: on each target Transformer Engine first, the newest release first.

    Args:
        rows: in any order, files that are no receipts among them.
        made_at: the report's clock, ISO 8601.
        targets: of the matrix: they say where the stack ends in the name of a file that cannot be read.
    """
    listed = list(rows)
    now = _instant(made_at)
    unreadable: dict[str, list[str]] = {}
    found: dict[str, list[HistoryRow]] = {}
    for row in listed:
        if row.outcome is None:
            unreadable.setdefault(row.cell, []).append(row.path)
        else:
            found.setdefault(row.cell, []).append(row)
    stacks: dict[tuple[str, str], dict[str, CellHistory]] = {}
    for cell, each in found.items():
        one = each[0]
        newest = tuple(sorted(each, key=lambda row: _rank(row, now), reverse=True))
        future = tuple(row for row in newest if _at(row) > now)
        lost = tuple(unreadable.get(cell, ()))
        history = CellHistory(cell, one.stack, one.target, one.probe, newest, future, lost)
        stacks.setdefault((one.target, one.stack), {})[one.probe] = history
    known = {*targets, *(row.target for row in listed if row.target)}
    for lone in _find_lost(unreadable.keys() - found.keys(), known):
        history = CellHistory(*lone, unreadable=tuple(unreadable[lone[0]]))
        stacks.setdefault((lone[2], lone[1]), {})[lone[3]] = history
    newest_first = sorted(stacks, key=lambda key: _version(key[1]), reverse=True)
    ordered = sorted(newest_first, key=lambda key: (key[0], family(key[1]) != "te", family(key[1])))
    return tuple(StackHistory(*key, dict(sorted(stacks[key].items()))) for key in ordered)


def choose_full(stacks: Sequence[StackHistory]) -> frozenset[tuple[str, str]]:
    """(target, stack) whose receipts are read in full: the newest of each target, as far as `MOST_PAGES` goes."""
    share = MOST_PAGES // max(len({stack.target for stack in stacks}), 1)
    used: dict[str, int] = {}
    chosen = set()
    for stack in stacks:
        before = used.get(stack.target, 0)
        if not before or before + len(stack.cells) <= share:
            chosen.add((stack.target, stack.stack))
        used[stack.target] = before + len(stack.cells)
    return frozenset(chosen)


def family(stack: str) -> str:
    """What stands before the release: "te" of "te2.20.2", all of "native"."""
    return stack[: re.match(r"\D*", stack).end()]  # type: ignore[union-attr]


def _find_lost(cells: Iterable[str], targets: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """Cell, stack, target and probe of names that have a known target in them; the longest target is meant."""
    names = sorted(targets, key=lambda name: (-len(name), name))
    for cell in sorted(cells):
        for target in names:
            stack, _, probe = cell.rpartition(f"-{target}-")
            if stack and probe:
                yield cell, stack, target, probe
                break


def _rank(row: HistoryRow, now: float) -> tuple[bool, bool, float, bool, bool, str]:
    # Of two from one moment the one that is not good: which folder's name comes later says nothing.
    return not _is_again(row), _at(row) <= now, _at(row), _is_bad(row), not row.same_as, row.run


def _is_bad(row: HistoryRow) -> bool:
    return row.outcome is not None and not row.outcome.is_good


def _is_again(row: HistoryRow) -> bool:
    """Whether a receipt is of a second run, made for its times alone: it replaces none with all checks."""
    return row.only_timed or row.run.rpartition("/")[2] == AGAIN


def _first_run(row: HistoryRow) -> str:
    return row.run.rpartition("/")[0] or "."


def _at(row: HistoryRow) -> float:
    return _instant(row.started)


def _instant(text: str) -> float:
    """Seconds since 1970; minus infinity where nobody knows."""
    return -math.inf if (moment := read_time(text)) is None else moment.timestamp()


def _version(stack: str) -> tuple[Version, str]:
    """The release that a stack names; of a name that is no version, the numbers that it begins with."""
    name = stack.removeprefix(family(stack))
    try:
        return Version(name), ""
    except (InvalidVersion, ValueError):
        numbers = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", name)
        return Version(numbers[0] if numbers else "0"), name
