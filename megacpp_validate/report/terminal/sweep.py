"""Every step between releases in a terminal: a grid of releases x modules, then what happened."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...canary.static.findings import ModuleVerdict, StaticResult, Sweep
from ..ink import draw_mark, draw_sentence, draw_step, draw_symbol, is_wide, plain, print_indented, print_marked
from ..marks import mark_impact, mark_verdict
from ..sections import Section, arrange_modules, is_shown
from ..summaries import count, summarize_sweep
from ..words.findings import LIMITS, headline, headline_of_fault, next_step

_ROOM: Final = 100  # columns from which the grid's columns stand apart


def render_sweep(sweep: Sweep, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print every step between releases as a grid, then what happened in the steps where something did."""
    console = console or Console()
    console.print(Text("Transformer Engine, release by release", "bold"))
    print_indented(console, draw_sentence(summarize_sweep(sweep)), 0)
    if sweep.steps:
        console.print()
        console.print(_draw_grid(sweep, console))
        console.print()
        print_indented(console, _draw_legend(console), 0)
    for release, reason in sweep.unreadable.items():
        print_indented(console, draw_sentence(f"not read: {release}: {reason}", "yellow"), 0)
    for step in sweep.steps:
        _print_step(step, verbose=verbose, console=console)
    console.print()
    faults = sum(len(step.unchanged_faults) for step in sweep.steps)
    if faults and not verbose:
        told = f"{count(faults, 'call')} failing on both sides of a step: not its doing (--verbose lists them)."
        print_indented(console, draw_sentence(told, "dim"), 0)
    total = sum(step.not_consumed for step in sweep.steps)
    sentence = f"{count(total, 'API change')} that the bridge does not consume"
    hint = "." if verbose or not total else " (--verbose lists them)."
    print_indented(console, draw_sentence(sentence + hint, "dim"), 0)
    print_limits(verbose=verbose, console=console)


def print_limits(*, verbose: bool, console: Console) -> None:
    """Print what a static tier cannot see: in short, or with the tier that sees it."""
    if not verbose:
        names = ", ".join(limit.what for limit in LIMITS)
        print_indented(console, draw_sentence(f"A static tier cannot see: {names}.", "dim"), 0)
        return
    console.print()
    console.print(Text("What a static tier cannot see, and what can", "bold"))
    for limit in LIMITS:
        text = draw_sentence(limit.what, "bold") + draw_sentence(f": {limit.why} Seen by {limit.seen_by}.")
        print_indented(console, text, 2)


def _draw_grid(sweep: Sweep, console: Console) -> Table:
    arranged = [{section.row.module: section for section in arrange_modules(step)} for step in sweep.steps]
    modules = list(dict.fromkeys(module for sections in arranged for module in sections))
    gap = 1 if console.width >= _ROOM else 0
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap))
    table.add_column("step", no_wrap=True)
    for module in modules:
        # Broken at the underscore, seven modules and a step fit into 80 columns.
        table.add_column(plain(module).replace("_", "_\n"), no_wrap=True)
    for step, sections in zip(sweep.steps, arranged, strict=True):
        row = [Text(draw_step(step.old.version, step.new.version, console))]
        row += [_draw_cell(sections.get(module), console) for module in modules]
        table.add_row(*row)
    return table


def _draw_cell(section: Section | None, console: Console) -> Text:
    if section is None:
        return Text("")
    if section.row.verdict is ModuleVerdict.CLEAN:
        return _draw_clean(console)  # quieter than a tick: in a grid the eye shall find the others
    number = sum(is_shown(finding, verbose=False) for finding in section.own)
    return draw_symbol(mark_verdict(section.row.verdict), console).append(str(number) if number else "")


def _draw_clean(console: Console) -> Text:
    return Text().append("·" if is_wide(console) else ".", "dim")


def _draw_legend(console: Console) -> Text:
    marks = [
        draw_mark(mark_verdict(verdict), console) for verdict in ModuleVerdict if verdict is not ModuleVerdict.CLEAN
    ]
    return Text("   ").join(
        [*marks, _draw_clean(console).append(" clean", "dim"), Text("a number counts findings", "dim")]
    )


def _print_step(step: StaticResult, *, verbose: bool, console: Console) -> None:
    shown = [finding for finding in step.findings if is_shown(finding, verbose=verbose)]
    cascades = [row for row in step.modules if row.verdict is ModuleVerdict.CASCADE]
    listed = step.changes_not_consumed if verbose else ()
    faults = step.unchanged_faults if verbose else ()
    if not (shown or cascades or listed or faults):
        return
    console.print()
    name = draw_step(step.old.version, step.new.version, console)
    console.print(Text(name + (" (a downgrade)" if step.downgrade else ""), "bold"))
    for finding in shown:
        text = draw_sentence(f"{finding.module}: ", "bold") + draw_sentence(headline(finding))
        print_marked(console, mark_impact(finding.impact), text)
        print_indented(console, draw_sentence(next_step(finding, step.old.version), "green"), 4)
    for row in cascades:
        print_marked(console, mark_verdict(row.verdict), draw_sentence(f"{row.module}: filed under {row.under}"))
    for finding in faults:
        sentence = f"{finding.module}: {headline_of_fault(finding)} (failing in {step.old.version} already)"
        print_marked(console, mark_impact(finding.impact), draw_sentence(sentence, "dim"))
    for change in listed:
        print_indented(console, draw_sentence(f"not consumed: {change}", "dim"), 2)
