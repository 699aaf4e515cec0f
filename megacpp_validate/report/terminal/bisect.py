"""A search for the first bad release in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...canary.dynamic.bisect_result import BisectResult
from ..ink import draw_mark, draw_sentence, plain, print_indented, print_labelled
from ..words.bisect import find_moving, list_points, say_axis, say_cost, say_doubts, say_headline, say_next, say_turns


def render_bisect(result: BisectResult, *, console: Console | None = None) -> None:
    """Print the answer, every point that was asked for, and what speaks against it."""
    console = console or Console()
    console.print(Text(plain(f"First bad release for {result.module}"), "bold"))
    print_indented(console, draw_sentence(say_headline(result)), 0)
    print_indented(console, draw_sentence(f"Judged by the {result.tier} tier.", "dim"), 0)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for axis in find_moving(result):
        table.add_column(plain(say_axis(axis.name)), no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("runs", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in list_points(result):
        table.add_row(*map(plain, row.choices), draw_mark(row.mark, console), row.runs, draw_sentence(row.reason))
    console.print(table)
    console.print()
    for sentence in say_turns(result):
        print_indented(console, draw_sentence(sentence), 0)
    for doubt in say_doubts(result):
        print_indented(console, draw_sentence(f"{doubt}.", "yellow"), 0)
    print_indented(console, draw_sentence(say_cost(result), "dim"), 0)
    print_labelled(console, "next", draw_sentence(say_next(result), "green"), 6)
