"""What the policy of low precision says of presets, in a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from ...gate.fp8_policy import PolicyResult, PresetDecision
from ..ink import draw_sentence, plain, print_indented, print_labelled, print_marked
from ..summaries import count
from ..words.presets import (
    find_faults,
    group_refusals,
    mark_preset,
    mark_waiver,
    say_waiver,
    say_waiver_row,
    say_what_runs,
    say_why,
    summarize_policy,
)

_LABEL: Final = 9


def render_policy(result: PolicyResult, *, console: Console | None = None) -> None:
    """Print each preset with what it may and may not, and every waiver."""
    console = console or Console()
    console.print(Text(f"What may run in low precision, on {result.today}, by {count(result.rules, 'rule')}", "bold"))
    print_indented(console, draw_sentence(summarize_policy(result)), 0)
    for decision in result.presets:
        _print_preset(decision, console)
    if result.waivers:
        console.print()
        console.print(Text("Waivers", "bold"))
    for waiver in result.waivers:
        print_marked(console, mark_waiver(waiver), draw_sentence(say_waiver_row(waiver)))


def _print_preset(decision: PresetDecision, console: Console) -> None:
    mark = mark_preset(decision)
    console.print()
    title = Text().append(f"{plain(decision.preset)} ", "bold").append(mark.word).append(f": {plain(decision.says)}")
    print_marked(console, mark, title, 0)
    label = "runs" if decision.is_allowed and decision.outcome.is_good else "asks for"
    print_labelled(console, label, draw_sentence(say_what_runs(decision)), _LABEL)
    for fault in find_faults(decision):
        print_labelled(console, "wrong", draw_sentence(fault, "red"), _LABEL)
    for refusal, said in group_refusals(decision):
        label = "may not" if refusal.waived_until is None else "waived"
        print_labelled(console, label, draw_sentence(said), _LABEL)
        print_labelled(console, "why", draw_sentence(say_why(refusal), "dim"), _LABEL)
        if refusal.waiver is not None:
            print_labelled(console, "waiver", draw_sentence(say_waiver(refusal), "yellow"), _LABEL)
        print_labelled(console, "next", draw_sentence(refusal.next, "green"), _LABEL)
