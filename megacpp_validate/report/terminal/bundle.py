"""A bundle in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from ...images.bundle.result import BundleResult
from ..ink import draw_sentence, plain, print_indented
from ..words.bundle import name_kind, say_absent, say_kind, say_size, summarize_bundle


def render_bundle(result: BundleResult, *, console: Console | None = None) -> None:
    """Print what is in it, what is not, and its id."""
    console = console or Console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("what", overflow="fold")
    table.add_column("files", overflow="fold")
    table.add_column("size", justify="right")
    for row in result.kinds:
        table.add_row(plain(name_kind(row)), plain(say_kind(row)), say_size(row.bytes))
    console.print(table)
    for line in say_absent(result):
        print_indented(console, draw_sentence(line, "yellow"), 0)
    console.print()
    print_indented(console, draw_sentence(summarize_bundle(result), "bold"), 0)
