"""The score of the blame in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...canary.dynamic.blame_score import BlameScore
from ..ink import draw_sentence, make_folding_table, plain, print_indented, print_labelled, print_opening
from ..words.blame_score import (
    HEADINGS,
    find_loud,
    find_unsettled,
    say_control,
    say_controls,
    say_culprits,
    say_lacking,
    say_right,
    say_verdict,
    score_modules,
)


def render_blame_score(score: BlameScore, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print the score a module, whatever is not right, and every fault where asked for."""
    console = console or Console()
    print_opening(console, "The score of the blame", say_right(score), say_controls(score), say_lacking(score))
    if not score.judged and not score.seen_controls:
        return
    print_indented(console, draw_sentence(score.environment, "dim"), 0)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("bridge module")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in score_modules(score):
        mark = Text("✓ ", "green") if row.is_whole else Text("✗ ", "red")
        if not row.faults:
            mark = Text("· ", "dim")
        table.add_row(mark + Text(row.module), *row.cells)
    console.print(table)
    for fault in find_unsettled(score):
        console.print(Text(plain(f"✗ {fault.fault} ({fault.release})"), "red"))
        print_labelled(console, "planted", draw_sentence(fault.says), 12)
        print_labelled(console, "came of it", draw_sentence(say_verdict(fault)), 12)
    for control in find_loud(score):
        console.print(Text(plain(f"✗ {control.name} ({control.release}): {say_control(control)}"), "red"))
    if verbose:
        _print_faults(score, console)
    print_indented(console, draw_sentence(f"{score.seconds:.0f} s", "dim"), 0)


def _print_faults(score: BlameScore, console: Console) -> None:
    table = make_folding_table("fault", "release", "verdict", "named", "next step")
    for row in score.faults:
        first = row.culprits[0].next_step if row.culprits else ""
        cells = (row.fault, row.release, row.verdict.value, say_culprits(row.culprits), first)
        table.add_row(*map(plain, cells))
    console.print(table)
