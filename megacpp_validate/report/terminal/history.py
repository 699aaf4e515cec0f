"""Cells over runs in a terminal: one in rows, many in a table."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megacpp_validate.evidence.history import CellHistory, HistoryResult, HistoryRow

from ..ink import draw_mark, draw_sentence, plain, print_indented, print_labelled, print_marked
from ..summaries import count
from ..words.history import (
    HEADINGS,
    NUMBERS_FROM,
    OVERVIEW,
    mark_last,
    mark_row,
    say_flakes,
    say_notes,
    say_trend,
    summarize_cell,
    summarize_history,
    tell_overview,
    tell_row,
)

_FEW: Final = 4  # cells that are told in rows
_LOST: Final = 5  # files of other cells that are named
_LABEL: Final = 7
_WHOLE: Final = 4  # columns of the overview that are not folded
_NARROWEST: Final = {"run": 12, "started": 10}  # a day; its hour on the line below


def render_history(result: HistoryResult, *, last: int, verbose: bool = False, console: Console | None = None) -> None:
    """Print few cells row by row, many as a table.

    Args:
        last: newest rows of each cell that are shown; 0 for all.
        verbose: every cell row by row, every unreadable file by name.
    """
    console = console or Console()
    print_indented(console, draw_sentence(summarize_history(result), "bold"), 0)
    if len(result.cells) > _FEW and not verbose:
        console.print()
        console.print(_draw_overview(result.cells, console))
    else:
        for history in result.cells:
            _print_cell(history, last, console)
    _print_lost(result, console, verbose=verbose)
    for note in result.notes:
        print_indented(console, draw_sentence(note, "yellow"), 0)


def _draw_overview(cells: tuple[CellHistory, ...], console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for number, heading in enumerate(OVERVIEW):
        table.add_column(heading, overflow="fold", no_wrap=number < _WHOLE)
    for history in cells:
        cell, _, *rest = tell_overview(history)
        table.add_row(Text(_line(cell)), draw_mark(mark_last(history), console), *(Text(_line(text)) for text in rest))
    return table


def _print_cell(history: CellHistory, last: int, console: Console) -> None:
    console.print()
    console.print(Text(_line(history.cell), "bold"), soft_wrap=True)
    print_indented(console, draw_sentence(summarize_cell(history)), 2)
    rows = history.rows[-last:] if last else history.rows
    if len(rows) < len(history.rows):
        hidden = f"The newest {len(rows)} of {len(history.rows)} (--last 0 shows all):"
        print_indented(console, draw_sentence(hidden, "dim"), 2)
    console.print(_draw_rows(rows, console))
    for row in rows:
        for note in say_notes(row):
            print_marked(console, mark_row(row), draw_sentence(_line(f"{row.run}: {note}")))
    for trend in history.trends:
        print_labelled(console, "trend", draw_sentence(say_trend(trend)), _LABEL)
    print_labelled(console, "flakes", draw_sentence(say_flakes(history.flakes)), _LABEL)


def _draw_rows(rows: tuple[HistoryRow, ...], console: Console) -> Table:
    """Columns that no row has anything for are left out; only run and time may be folded."""
    told = [tell_row(row) for row in rows]
    kept = [number for number in range(len(HEADINGS)) if any(cells[number] for cells in told)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for number in kept:
        heading, is_number = HEADINGS[number], number >= NUMBERS_FROM
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=heading not in ("run", "started"),
            min_width=_NARROWEST.get(heading),
        )
    for row, cells in zip(rows, told, strict=True):
        texts = [Text(_line(cells[number])) for number in kept]
        texts[1] = draw_mark(mark_row(row), console)
        table.add_row(*texts)
    return table


def _line(text: str) -> str:
    """Names and reasons are of others: on one line, and nothing that a terminal obeys."""
    return " ".join(plain(text).split())


def _print_lost(result: HistoryResult, console: Console, *, verbose: bool) -> None:
    if not result.lost:
        return
    console.print()
    title = f"{count(len(result.lost), 'file')} of the store that no receipt can be read from, of no cell above"
    console.print(Text(title, "bold red"), soft_wrap=True)
    for number, (path, why) in enumerate(result.lost.items()):
        if number == _LOST and not verbose:
            rest = f"and {len(result.lost) - _LOST} more (--verbose lists them)"
            print_indented(console, draw_sentence(rest, "dim"), 4)
            break
        print_labelled(console, _line(path), draw_sentence(f" {_line(why)}"), 0)
