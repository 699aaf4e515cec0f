"""What the bridge made of each damaged install, in a terminal."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megacpp_validate.evidence.firewall import FirewallCase, FirewallOutcome, FirewallResult

from .ink import draw_mark, draw_sentence, plain, print_indented, print_labelled
from .marks import mark_outcome
from .summaries import first_sentence, summarize_firewall

_ROOM_FOR_DAMAGE: Final = 100  # columns from which the damage has a column of its own
_LABEL: Final = 10


def render_firewall(result: FirewallResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print one row a case; in full those that are not as expected, and all of them where asked for."""
    console = console or Console()
    console.print(Text("Import firewall", "bold"))
    print_indented(console, draw_sentence(summarize_firewall(result)), 0)
    host = f"{result.tool}, Python {result.python}, torch {result.torch or 'none'}"
    print_indented(console, draw_sentence(host, "dim"), 0)
    if result.cases:
        console.print()
        console.print(_draw_cases(result.cases, console))
    for case in result.cases:
        if verbose or case.problems or case.outcome is not FirewallOutcome.PASS:
            _print_case(case, console)


def _draw_cases(cases: tuple[FirewallCase, ...], console: Console) -> Table:
    has_damage = console.width >= _ROOM_FOR_DAMAGE
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("outcome", no_wrap=True)
    table.add_column("case", overflow="fold", ratio=3, min_width=14)
    if has_damage:
        table.add_column("damage", overflow="fold", ratio=4)
    table.add_column("what the bridge said", overflow="fold", ratio=5)
    table.add_column("ended", overflow="fold", max_width=18 if has_damage else 8)
    for case in cases:
        name = draw_sentence(case.case, "bold")
        if not has_damage:  # below the id, so that no column becomes a ribbon
            name = name + Text("\n") + draw_sentence(case.damage, "dim")
        said = draw_sentence(first_sentence(case.reason) or _say_silence(case))
        damage = [draw_sentence(case.damage)] if has_damage else []
        table.add_row(
            draw_mark(mark_outcome(case.outcome), console), name, *damage, said, plain(case.ended or "-")
        )
    return table


def _say_silence(case: FirewallCase) -> str:
    return "nothing: it is available" if case.available else "nothing"


def _print_case(case: FirewallCase, console: Console) -> None:
    console.print()
    console.print(draw_mark(mark_outcome(case.outcome), console, case.case))
    for problem in case.problems:
        print_labelled(console, "problem", draw_sentence(problem, "bold"), _LABEL)
    print_labelled(console, "damage", draw_sentence(case.damage), _LABEL)
    print_labelled(
        console, "release", draw_sentence(f"{case.release}, compiled half: {case.compiled}"), _LABEL
    )
    answers = {None: "no answer", True: "True", False: "False"}
    print_labelled(console, "available", draw_sentence(answers[case.available]), _LABEL)
    print_labelled(console, "reason", draw_sentence(case.reason or "none given"), _LABEL)
    for module, path in case.native_paths.items():
        print_labelled(console, "native", draw_sentence(f"{module}: {path}"), _LABEL)
    print_labelled(
        console, "ended", draw_sentence(f"{case.ended or 'unknown'}, {case.seconds:.1f} s"), _LABEL
    )
