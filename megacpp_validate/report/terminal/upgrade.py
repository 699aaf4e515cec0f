"""The upgrade canary's answer over all its tiers, on one page of a terminal."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...canary.dynamic.upgrade_result import Culprit, StepResult, UpgradeResult
from ...canary.firewall.result import FirewallOutcome
from ..ink import draw_mark, draw_sentence, draw_step, plain, print_indented, print_labelled
from ..marks import mark_cell
from ..summaries import summarize_firewall
from ..words.upgrade import (
    find_lost,
    find_problems,
    find_slower,
    mark_change,
    say_cascades,
    say_culprit,
    say_outcome,
    say_runs,
    say_seconds,
    say_stack,
    say_timing,
    say_timings,
    say_version,
    summarize_step,
    summarize_upgrade,
)
from .firewall import render_firewall
from .static_tier import render_static

_LABEL: Final = 10


def render_upgrade(result: UpgradeResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print the answer, the grid, the blame of every step, and what the other tiers say."""
    console = console or Console()
    where = f" on {result.target}" if result.target else ""
    console.print(Text(plain(f"Upgrade canary{where}: {', '.join(result.tiers)}"), "bold"))
    print_indented(console, draw_sentence(summarize_upgrade(result)), 0)
    if result.grid is not None:
        _print_grid(result, console)
        for step in result.steps:
            _print_step(step, result, verbose=verbose, console=console)
    for static in result.static:
        console.print()
        render_static(static, verbose=verbose, console=console)
    if result.firewall is not None:
        console.print()
        if verbose or any(case.outcome is not FirewallOutcome.PASS for case in result.firewall.cases):
            render_firewall(result.firewall, verbose=verbose, console=console)
        else:
            print_indented(console, draw_sentence(summarize_firewall(result.firewall)), 0)
    console.print()
    if result.stacks:
        print_indented(console, draw_sentence(say_runs(result), "dim"), 0)
        for stack in result.stacks:
            if not stack.problem:
                print_indented(console, draw_sentence(say_stack(stack), "dim"), 0)
    print_indented(console, draw_sentence(f"{result.tool}; {say_seconds(result)}", "dim"), 0)


def _print_grid(result: UpgradeResult, console: Console) -> None:
    grid = result.grid
    if grid is None:
        return
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name in ("stack", *(module.replace("_", "_\n") for module in grid.modules)):
        table.add_column(plain(name), overflow="fold")
    for row in grid.rows:
        cells = (draw_mark(mark_cell(cell.outcome), console) for cell in row.cells)
        table.add_row(plain(row.stack), *cells)
    console.print(table)
    for stacks, problem in find_problems(result).items():
        print_indented(console, draw_sentence(f"{stacks}: {problem}", "yellow"), 0)
    for file, reason in grid.unreadable.items():
        print_indented(console, draw_sentence(f"not read: {file}: {reason}", "yellow"), 0)


def _print_step(step: StepResult, result: UpgradeResult, *, verbose: bool, console: Console) -> None:
    console.print()
    style = "bold red" if step.breaks else "bold yellow" if step.lost else "bold"
    title = Text(plain(draw_step(step.before, step.after, console)), style)
    console.print(title)
    print_indented(console, draw_sentence(summarize_step(step)), 2)
    for culprit in step.culprits:
        _print_culprit(culprit, verbose=verbose, console=console)
    for row in find_slower(step) if not verbose else step.timings:
        print_labelled(console, "time", draw_sentence(f"{row.module}: {say_timing(row)}"), _LABEL)
    if step.timings and not verbose and not find_slower(step):
        print_labelled(console, "time", draw_sentence(say_timings(step), "dim"), _LABEL)
    for version in step.versions:
        print_labelled(console, "changed", draw_sentence(say_version(version), "dim"), _LABEL)
    below_the_grid = set(find_problems(result).values())
    for cells, reason in find_lost(step).items():
        if reason not in below_the_grid:
            print_labelled(console, "lost", draw_sentence(f"{cells}: {reason}", "yellow"), _LABEL)
    if verbose:
        for change in step.modules:
            mark = draw_mark(mark_change(change), console, change.module)
            told = f" ({say_outcome(change.before)} → {say_outcome(change.after)})"
            print_indented(console, mark + draw_sentence(told, "dim"), 4)


def _print_culprit(culprit: Culprit, *, verbose: bool, console: Console) -> None:
    console.print()
    print_indented(console, Text("✗ " if console.encoding.lower().startswith("utf") else "X ", "bold red")
                   + draw_sentence(say_culprit(culprit), "bold"), 2)  # fmt: skip
    print_labelled(console, "seen", draw_sentence(culprit.summary), _LABEL)
    for line in culprit.evidence if verbose or not culprit.is_slowdown else ():  # the times below tell it shorter
        print_labelled(console, "evidence", draw_sentence(line), _LABEL)
    if culprit.entry_points:
        print_labelled(console, "TE", draw_sentence(", ".join(culprit.entry_points), "cyan"), _LABEL)
    if culprit.cascades:
        print_labelled(console, "cascade", draw_sentence(say_cascades(culprit)), _LABEL)
    print_labelled(console, "next", draw_sentence(culprit.next_step, "green"), _LABEL)
