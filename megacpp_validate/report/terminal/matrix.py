"""A run of many cells in a terminal: a row a cell."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...environments.matrix_result import MatrixPlan, MatrixRun
from ..ink import draw_mark, draw_sentence, plain, print_indented
from ..marks import mark_cell
from ..words.matrix import say_retries, summarize_matrix, summarize_plan

_LEFT: Final = "left"


def render_matrix(run: MatrixRun, *, console: Console | None = None) -> None:
    """Print every cell, then why those that are not good are not, and what was run again."""
    console = console or Console()
    print_indented(console, draw_sentence(summarize_matrix(run), "bold"), 0)
    console.print()
    table = Table(show_edge=False, box=None, padding=(0, 1))
    for name in ("cell", "outcome", "node"):
        table.add_column(name, justify=_LEFT, overflow="fold")
    table.add_column("seconds", justify="right")
    table.add_column("again", justify="right")
    for cell in run.cells:
        mark = draw_mark(mark_cell(cell.outcome), console)
        node = "(kept)" if cell.kept else plain(cell.node)
        again = str(len(cell.retries)) if cell.retries else ""
        table.add_row(Text(plain(cell.cell)), mark, Text(node, "dim"), f"{cell.seconds:.1f}", again)
    console.print(table)
    for cell in run.cells:
        if not cell.outcome.is_good and cell.reason:
            console.print()
            print_indented(console, draw_sentence(f"{cell.cell}: {cell.reason}"), 0)
    console.print()
    for cell in run.cells:
        for fault in cell.retries:
            print_indented(console, draw_sentence(f"{cell.cell} again: {fault}", "dim"), 0)
    print_indented(console, draw_sentence(f"{say_retries(run)}; {run.seconds:.1f} s", "dim"), 0)
    print_indented(console, draw_sentence(f"receipts and logs: {run.folder}", "dim"), 0)


def render_matrix_plan(plan: MatrixPlan, *, console: Console | None = None) -> None:
    """Print every job that would be given."""
    console = console or Console()
    print_indented(console, draw_sentence(summarize_plan(plan), "bold"), 0)
    console.print()
    table = Table(show_edge=False, box=None, padding=(0, 1))
    table.add_column("cell", overflow="fold")
    for name in ("GPUs", "expected", "limit"):
        table.add_column(name, justify="right")
    table.add_column("after", overflow="fold")
    for cell in plan.cells:
        row = (plain(cell.cell), str(cell.gpus), f"{cell.seconds:g} s", f"{cell.limit_s:g} s", plain(cell.after))
        table.add_row(*map(Text, row))
    console.print(table)
    if asked := {cell.target: cell.asks for cell in plan.cells if cell.asks}:
        console.print()
        for target, words in asked.items():
            print_indented(console, draw_sentence(f"{target}: sbatch {' '.join(words)}", "dim"), 0)
