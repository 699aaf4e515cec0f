"""The static tier's answer in a terminal: any width, with or without colour, on a screen or in a pipe.

`render_sweep` and `render_firewall` are found here too.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...canary.static.findings import Finding, ModuleVerdict, StaticResult
from ..ink import draw_mark, draw_sentence, draw_step, plain, print_indented, print_labelled, print_marked, print_place
from ..marks import mark_impact, mark_verdict
from ..sections import Section, arrange_modules, is_shown, sort_by_verdict
from ..summaries import count, count_impacts, say_direction, say_not_consumed, summarize_static
from ..words.findings import consequence, headline, headline_of_fault, next_step, next_step_of_fault
from .firewall import render_firewall
from .sweep import print_limits, render_sweep

__all__ = ["render_firewall", "render_static", "render_sweep"]


def render_static(result: StaticResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print the static tier's answer for one pair of releases."""
    console = console or Console()
    console.print(Text(f"Transformer Engine {draw_step(result.old.version, result.new.version, console)}", "bold"))
    if result.downgrade:
        print_indented(console, draw_sentence(say_direction(result), "bold yellow"), 0)
    print_indented(console, draw_sentence(summarize_static(result)), 0)
    sections = arrange_modules(result)
    console.print()
    console.print(_draw_modules(sections, console))
    for section in sort_by_verdict(sections):
        _print_section(section, result, verbose=verbose, console=console)
    if result.unchanged_faults:
        _print_faults(result, console)
    console.print()
    _print_rest(result, verbose=verbose, console=console)
    print_limits(verbose=verbose, console=console)


def _draw_modules(sections: tuple[Section, ...], console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("bridge module", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("findings", overflow="fold")
    for section in sections:
        parts = [count_impacts(section.own)] if section.own else []
        if section.row.verdict is ModuleVerdict.CASCADE:
            parts.append(f"filed under {section.row.under}")
        elif section.shared:
            blamed = ", ".join(dict.fromkeys(finding.module for finding in section.shared))
            parts.append(f"{count(len(section.shared), 'finding')} filed under {blamed}")
        mark = mark_verdict(section.row.verdict)
        table.add_row(plain(section.row.module), draw_mark(mark, console), Text(plain("; ".join(parts))))
    return table


def _print_section(section: Section, result: StaticResult, *, verbose: bool, console: Console) -> None:
    shown = [finding for finding in section.own if is_shown(finding, verbose=verbose)]
    if not shown and not section.cascades:
        return
    console.print()
    console.print(draw_mark(mark_verdict(section.row.verdict), console, section.row.module))
    for finding in shown:
        _print_finding(finding, result, verbose=verbose, console=console)
    if section.cascades:
        sentence = f"red because of this, not culprits of their own: {', '.join(section.cascades)}"
        print_marked(console, mark_verdict(ModuleVerdict.CASCADE), draw_sentence(sentence))


def _print_finding(finding: Finding, result: StaticResult, *, verbose: bool, console: Console) -> None:
    print_marked(console, mark_impact(finding.impact), draw_sentence(headline(finding), "bold"))
    print_indented(console, draw_sentence(consequence(finding)), 4)
    width = max(len("consumed"), len(result.old.version), len(result.new.version)) + 2
    print_place(console, result.old.version, finding.before, width)
    print_place(console, result.new.version, finding.after, width)
    for site in finding.call_sites:
        print_place(console, "consumed", site, width)
    others = [module for module in finding.modules if module != finding.module]
    if others:
        print_labelled(console, "also in", draw_sentence(", ".join(others)), width)
    if verbose:
        print_labelled(console, "symbol", draw_sentence(finding.symbol), width)
        print_labelled(console, "cause", draw_sentence(finding.cause), width)
    print_labelled(console, "next", draw_sentence(next_step(finding, result.old.version), "green"), width)


def _print_faults(result: StaticResult, console: Console) -> None:
    console.print()
    console.print(Text(f"Failing in {plain(result.old.version)} already: not this step's doing", "bold"))
    for finding in result.unchanged_faults:
        sentence = f"{finding.module}: {headline_of_fault(finding)}"
        print_marked(console, mark_impact(finding.impact), draw_sentence(sentence))
        for site in finding.call_sites:
            print_place(console, "consumed", site, len("consumed") + 2)
        step = draw_sentence(next_step_of_fault(finding, result.old.version), "green")
        print_labelled(console, "next", step, len("consumed") + 2)


def _print_rest(result: StaticResult, *, verbose: bool, console: Console) -> None:
    hidden = sum(not is_shown(finding, verbose=verbose) for finding in result.findings)
    if hidden:
        sentence = f"{count(hidden, 'change')} to what the bridge consumes, in ways that its calls do not touch."
        print_indented(console, draw_sentence(sentence, "dim"), 0)
    is_hint = not verbose and bool(result.not_consumed or hidden)
    sentence = say_not_consumed(result) + (" (--verbose lists them)." if is_hint else ".")
    print_indented(console, draw_sentence(sentence, "dim"), 0)
    if verbose:
        for change in result.changes_not_consumed:
            print_indented(console, draw_sentence(change, "dim"), 2)
        for source in (result.old, result.new):
            line = f"{plain(source.version)}: {plain(source.wheel)} sha256:{plain(source.sha256)}"
            console.print(Text(line, "dim"), soft_wrap=True)
