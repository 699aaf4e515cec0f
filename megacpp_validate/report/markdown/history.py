"""Cells over runs in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from megacpp_validate.evidence.history import CellHistory, HistoryResult

from ..words.history import (
    HEADINGS,
    OVERVIEW,
    mark_row,
    say_flakes,
    say_notes,
    say_trend,
    summarize_cell,
    summarize_history,
    tell_overview,
    tell_row,
)
from .text import escape


def tell_history(result: HistoryResult, *, last: int) -> list[str]:
    """A table of cells, then each in rows; `last` is the number of newest rows of each, 0 for all."""
    lines = ["## History", "", f"**{escape(summarize_history(result))}**", "", *_tell_heading(OVERVIEW)]
    lines += [_tell_line(tell_overview(history)) for history in result.cells]
    for history in result.cells:
        lines += _tell_cell(history, last)
    if result.lost:
        lines += ["", "### Unreadable, and of no cell above", ""]
        lines += [f"- {escape(path)}: {escape(why)}" for path, why in result.lost.items()]
    for note in result.notes:
        lines += ["", escape(note)]
    return lines


def _tell_cell(history: CellHistory, last: int) -> list[str]:
    rows = history.rows[-last:] if last else history.rows
    lines = ["", f"### {escape(history.cell)}", "", escape(summarize_cell(history)), ""]
    if len(rows) < len(history.rows):
        lines += [f"The newest {len(rows)} of {len(history.rows)}:", ""]
    lines += _tell_heading(HEADINGS)
    for row in rows:
        run, word, *rest = tell_row(row)
        lines.append(_tell_line((run, f"{mark_row(row).symbol} {word}", *rest)))
    notes = [f"- {escape(row.run)}: {escape(note)}" for row in rows for note in say_notes(row)]
    lines += ["", *notes] if notes else []
    lines += ["", *(f"- {escape(say_trend(trend))}" for trend in history.trends)]
    return [*lines, f"- flakes: {escape(say_flakes(history.flakes))}"]


def _tell_heading(names: Iterable[str]) -> list[str]:
    names = tuple(names)
    return [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]


def _tell_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(escape(cell) for cell in cells)} |"
