"""The score of the smoke run's checks in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...canary.dynamic.smoke_fault_score import SmokeFaultScore
from ..ink import draw_sentence, make_folding_table, plain, print_indented, print_labelled, print_opening
from ..words.smoke_faults import (
    find_unsettled,
    name_check,
    name_verdict,
    say_alarms,
    say_caught,
    say_clean,
    say_lacking,
    say_named,
    say_others,
    say_place,
    say_way,
)


def render_smoke_faults(score: SmokeFaultScore, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print every fault with its verdict, whatever is not right in full, and what other checks said where asked for."""
    console = console or Console()
    print_opening(console, "Faults planted in the smoke run", say_caught(score), say_alarms(score), say_lacking(score))
    if not score.judged:
        return
    print_indented(console, draw_sentence(score.environment, "dim"), 0)
    console.print()
    table = make_folding_table("fault", "verdict", "by", "named", *(("other checks",) if verbose else ()))
    for row in score.faults:
        mark = Text("✓ ", "green") if row.is_good else Text("✗ ", "red") if row.was_judged else Text("· ", "dim")
        cells = (name_verdict(row), name_check(row.caught_by), say_named(row), *((say_others(row),) if verbose else ()))
        table.add_row(mark + Text(plain(row.fault)), *map(plain, cells))
    console.print(table)
    for row in find_unsettled(score):
        console.print(Text(plain(f"{'✗' if row.was_judged else '·'} {row.fault}"), "red" if row.was_judged else "dim"))
        print_labelled(console, "planted", draw_sentence(f"{row.says} {say_place(row)}"), 12)
        print_labelled(console, "came of it", draw_sentence(row.reason), 12)
        print_labelled(console, "others", draw_sentence(say_others(row) or "nothing"), 12)
    for run in score.alarms:
        console.print(Text(plain(f"✗ false alarm: {run.title}; {say_way(run.way)}"), "red"))
        print_labelled(console, "came of it", draw_sentence(say_clean(run)), 12)
    print_indented(console, draw_sentence(f"{score.seconds:.0f} s", "dim"), 0)
