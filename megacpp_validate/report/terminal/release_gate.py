"""What a release gate decided, in a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from megacpp_validate.evidence.release_gate import CellVerdict, GateDecision

from ..ink import draw_sentence, draw_symbol, plain, print_indented, print_labelled, print_marked
from ..summaries import first_sentence
from ..words.gate import (
    group_warnings,
    list_others,
    mark_cell_verdict,
    mark_gate,
    mark_gate_waiver,
    name_culprit,
    say_bound,
    say_culprit_lines,
    say_gate,
    say_gate_waiver,
    say_not_counting,
    say_place,
    say_why,
    summarize_gate,
)

_LABEL: Final = 9


def render_release_gate(decision: GateDecision, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print the answer, every required cell, who closes the gate, and what else there is.

    Args:
        verbose: whole reasons, and every receipt that does not count by itself.
    """
    console = console or Console()
    console.print(Text(f"Release gate: {plain(say_gate(decision))}, at {decision.judged_at}", "bold"))
    print_indented(console, draw_sentence(summarize_gate(decision)), 2, first=draw_symbol(mark_gate(decision), console))
    _head(console, "Required cells")
    under = {name: row.module for row in decision.culprits for name in row.cascades if name != row.module}
    for verdict in decision.required:
        if verdict.closes and verdict.probe in under and not verbose:
            by = Text(f", by {plain(under[verdict.probe])}")
            print_marked(console, mark_cell_verdict(verdict), _title(verdict, verdict.probe) + by)
        else:
            _print_verdict(verdict, verdict.probe, console, verbose=verbose)
    _print_culprits(decision, console)
    if others := list_others(decision):
        _head(console, "In the way, and not required")
    for verdict in others:
        _print_verdict(verdict, say_place(verdict), console, verbose=verbose)
    _print_notes(decision, console, verbose=verbose)


def _print_verdict(verdict: CellVerdict, name: str, console: Console, *, verbose: bool) -> None:
    print_marked(console, mark_cell_verdict(verdict), _title(verdict, name))
    for why in say_why(verdict, whole=verbose):
        print_labelled(console, "why", draw_sentence(why), _LABEL)


def _title(verdict: CellVerdict, name: str) -> Text:
    title = Text().append(f"{plain(name)} ", "bold").append(mark_cell_verdict(verdict).word)
    return title.append(f", {plain(verdict.waived_by)} answers for it") if verdict.waived_by else title


def _print_culprits(decision: GateDecision, console: Console) -> None:
    if decision.culprits:
        _head(console, "Who closes it")
    for culprit in decision.culprits:
        print_marked(console, mark_gate(decision), Text(plain(name_culprit(culprit)), "bold"))
        for label, text in say_culprit_lines(culprit):
            print_labelled(console, label, draw_sentence(text, "green" if label == "next" else ""), _LABEL)


def _print_notes(decision: GateDecision, console: Console, *, verbose: bool) -> None:
    if decision.waivers:
        _head(console, "Waivers")
    for waiver in decision.waivers:
        print_marked(console, mark_gate_waiver(waiver), draw_sentence(say_gate_waiver(waiver)))
    if warnings := group_warnings(decision):
        _head(console, "To know")
    for warning, probes in warnings.items():
        said = warning if verbose else first_sentence(warning)
        print_indented(console, draw_sentence(f"- {said} ({', '.join(probes)})", "dim"), 4, first=Text("  "))
    if quiet := say_not_counting(decision):
        _head(console, "Receipts that do not count")
        print_indented(console, draw_sentence("; ".join(quiet)), 2)
    if verbose:
        for verdict in decision.cells:
            if not verdict.required and not verdict.closes:
                _print_verdict(verdict, say_place(verdict), console, verbose=True)
    console.print()
    for line in say_bound(decision):
        print_indented(console, draw_sentence(line, "dim"), 0)


def _head(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, "bold"))
