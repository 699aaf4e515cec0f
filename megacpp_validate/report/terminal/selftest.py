"""The score of the suite in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megacpp_validate.evidence.selftest import SelftestResult

from ..ink import draw_sentence, make_folding_table, plain, print_indented, print_labelled, print_opening
from ..words.selftest import (
    find_unsettled,
    say_blame_accuracy,
    say_false_alarms,
    say_kill_rate,
    say_unsettled,
    score_modules,
)


def render_selftest(result: SelftestResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print the score a module, whatever is not as it should be, and every mutant where asked for."""
    console = console or Console()
    said = say_kill_rate(result), say_blame_accuracy(result), say_false_alarms(result)
    print_opening(console, "The suite's own score", *said)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("bridge module")
    for heading in ("mutants", "killed", "blamed rightly"):
        table.add_column(heading, justify="right")
    for score in score_modules(result):
        whole = score.mutants == score.killed == score.blamed_rightly
        mark = Text("✓ ", "green") if whole else Text("✗ ", "red")
        if not score.mutants:
            mark = Text("· ", "dim")
        table.add_row(mark + Text(score.module), *(str(number) for number in score[1:]))
    console.print(table)
    for row in find_unsettled(result):
        console.print(Text(plain(f"✗ {row.mutant.id}"), "red"))
        print_labelled(console, "planted", draw_sentence(row.mutant.says), 12)
        print_labelled(console, "came of it", draw_sentence(say_unsettled(row)), 12)
    for alarm in result.false_alarms:
        console.print(Text(plain(f"✗ false alarm: {alarm.cell}, seed {alarm.seed}: {alarm.check}"), "red"))
    for reason in result.lost:
        console.print(Text(plain(f"✗ lost: {reason}"), "red"))
    if verbose:
        _print_mutants(result, console)
    print_indented(console, draw_sentence(f"{result.seconds:.0f} s", "dim"), 0)


def _print_mutants(result: SelftestResult, console: Console) -> None:
    table = make_folding_table("mutant", "fate", "blamed", "by check")
    for row in result.mutants:
        table.add_row(*(plain(cell) for cell in (row.mutant.id, row.fate.value, ", ".join(row.blamed), row.check)))
    console.print(table)
