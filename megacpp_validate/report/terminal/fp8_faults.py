"""The score of the FP8 cells in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...canary.dynamic.fp8_fault_score import Fp8FaultScore, Fp8Verdict
from ..ink import draw_sentence, make_folding_table, plain, print_indented, print_labelled, print_opening
from ..words.fp8_faults import (
    find_unsettled,
    name_verdict,
    say_alarms,
    say_caught,
    say_green,
    say_lacking,
    say_seen,
    say_verdict,
)


def render_fp8_faults(score: Fp8FaultScore, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print every fault with its verdict, whatever is not right in full, and all checks where asked for."""
    console = console or Console()
    print_opening(
        console, "Faults planted in the low-precision stack", say_caught(score), say_alarms(score), say_lacking(score)
    )
    if not score.judged:
        return
    print_indented(console, draw_sentence(score.environment, "dim"), 0)
    console.print()
    table = make_folding_table("fault", "release", "verdict", "red, by", *(("green",) if verbose else ()))
    for row in score.faults:
        good = row.verdict is Fp8Verdict.CAUGHT and not row.is_alarm
        mark = Text("✓ ", "green") if good else Text("✗ ", "red")
        seen = say_seen(row) if verbose or row.was_judged else ""
        cells = (row.release, name_verdict(row), seen, *((say_green(row),) if verbose else ()))
        table.add_row(mark + Text(plain(row.fault)), *map(plain, cells))
    console.print(table)
    for row in find_unsettled(score):
        console.print(Text(plain(f"✗ {row.fault} ({row.release})"), "red"))
        print_labelled(console, "planted", draw_sentence(row.says), 12)
        print_labelled(console, "must see it", draw_sentence(", ".join(row.wants)), 12)
        print_labelled(console, "came of it", draw_sentence(say_verdict(row)), 12)
    print_indented(console, draw_sentence(f"{score.seconds:.0f} s", "dim"), 0)
