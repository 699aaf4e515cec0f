"""What the bridge made of each damaged install, in a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from ...canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
from ..ink import draw_mark, draw_sentence, print_indented, print_labelled, print_marked
from ..marks import mark_outcome
from ..summaries import split_reason, summarize_firewall

_LABEL: Final = 10


def render_firewall(result: FirewallResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print one row a case; in full those that are not as expected, and all of them where asked for."""
    console = console or Console()
    console.print(Text("Import firewall", "bold"))
    print_indented(console, draw_sentence(summarize_firewall(result)), 0)
    host = f"{result.tool}, Python {result.python}, torch {result.torch or 'none'}"
    print_indented(console, draw_sentence(host, "dim"), 0)
    console.print()
    for case in result.cases:
        if verbose or case.problems or case.outcome is not FirewallOutcome.PASS:
            _print_case(case, console)
        else:
            _print_row(case, console)


def _print_row(case: FirewallCase, console: Console) -> None:
    """One case as a person skims it: what was done, what the bridge took it for, and what to do."""
    mark = mark_outcome(case.outcome)
    title = draw_sentence(case.case, "bold") + Text(f" ({case.ended})" if case.ended != "exit" else "", "dim")
    print_marked(console, mark, title, 0)
    print_labelled(console, "damage", draw_sentence(case.damage), _LABEL)
    cause, step = split_reason(case.reason)
    if not case.reason:
        answer = "available" if case.available else "nothing"
        print_labelled(console, "said", draw_sentence(answer), _LABEL)
        return
    print_labelled(console, "said", draw_sentence(cause), _LABEL)
    if step:
        print_labelled(console, "next", draw_sentence(step), _LABEL)


def _print_case(case: FirewallCase, console: Console) -> None:
    console.print()
    console.print(draw_mark(mark_outcome(case.outcome), console, case.case))
    for problem in case.problems:
        print_labelled(console, "problem", draw_sentence(problem, "bold"), _LABEL)
    print_labelled(console, "damage", draw_sentence(case.damage), _LABEL)
    print_labelled(console, "release", draw_sentence(f"{case.release}, compiled half: {case.compiled}"), _LABEL)
    answers = {None: "no answer", True: "True", False: "False"}
    print_labelled(console, "available", draw_sentence(answers[case.available]), _LABEL)
    print_labelled(console, "reason", draw_sentence(case.reason or "none given"), _LABEL)
    for module, path in case.native_paths.items():
        print_labelled(console, "native", draw_sentence(f"{module}: {path}"), _LABEL)
    print_labelled(console, "ended", draw_sentence(f"{case.ended or 'unknown'}, {case.seconds:.1f} s"), _LABEL)
