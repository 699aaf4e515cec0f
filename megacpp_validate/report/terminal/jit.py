"""The JIT caches in a terminal: a prewarm, and the verdict on a sealed cache."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...jitcache.result import JitTaskState, JitVerdict, JitVerifyResult, JitVerifyRow, PrewarmResult
from ..ink import draw_mark, draw_sentence, plain, print_indented, print_labelled
from ..summaries import count
from ..words.jit import (
    mark_state,
    mark_warmth,
    say_bytes,
    say_caches,
    say_compile,
    say_difference,
    say_looked_for,
    say_next_step,
    say_step_for_differences,
    say_task,
    say_unkept,
    say_why,
    summarize_prewarm,
    summarize_verify,
)

_LABEL: Final = 11
_MOST_COMPILES: Final = 12  # of one row that are told without --verbose


def render_prewarm(result: PrewarmResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print a row a task, what failed in full, and what lies in the caches now."""
    console = console or Console()
    console.print(Text(plain(f"JIT caches of {result.target} ({result.architecture}, {result.mode})"), "bold"))
    print_indented(console, draw_sentence(summarize_prewarm(result)), 0)
    if result.swept:
        swept = count(result.swept, "file")
        print_indented(console, draw_sentence(f"{swept} of a killed prewarm, which no finished task owns, went."), 0)
    if result.rows:
        console.print()
        table = _new_table("task", "state", "seconds", "compiled")
        for row in result.rows:
            bad = row.state in (JitTaskState.FAILED, JitTaskState.NOT_RUN)
            told = "" if bad else say_task(row)
            mark = draw_mark(mark_state(row.state), console)
            table.add_row(plain(row.task), mark, f"{row.seconds:.1f}" if row.seconds else "", plain(told))
        console.print(table)
    for row in result.rows:
        if row.state in (JitTaskState.FAILED, JitTaskState.NOT_RUN):
            console.print(draw_mark(mark_state(row.state), console, row.task))
            print_labelled(console, "why", draw_sentence(row.reason), _LABEL)
        elif verbose and row.compiled:
            console.print(Text(plain(row.task), "bold"))
            for one in row.compiled:
                print_labelled(console, "compiled", draw_sentence(say_compile(one)), _LABEL)
    console.print()
    for line in result.left_out:
        print_indented(console, draw_sentence(f"left out: {line}", "dim"), 0)
    print_indented(console, draw_sentence(f"{result.folder}: {say_caches(result.caches)}", "dim"), 0)
    print_indented(console, draw_sentence(f"{result.interpreter}; {result.seconds:.1f} s", "dim"), 0)


def render_verify(result: JitVerifyResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print a row a task, and below it every compile with kernel and shape."""
    console = console or Console()
    console.print(
        Text(plain(f"The sealed JIT cache of {result.target} ({result.architecture}, {result.mode})"), "bold")
    )
    print_indented(console, draw_sentence(summarize_verify(result)), 0)
    size = f"{count(result.files, 'file')}, {say_bytes(result.bytes)}, every hash right"
    print_indented(console, draw_sentence(f"{result.folder}: {size}; {result.manifest}", "dim"), 0)
    for difference in result.differences:
        print_labelled(console, "differs", draw_sentence(say_difference(difference), "red"), _LABEL)
    if result.differences:
        print_labelled(console, "next", draw_sentence(say_step_for_differences(result), "green"), _LABEL)
    if result.rows:
        console.print()
        table = _new_table("task", "verdict", "seconds", "compiled", "found")
        for row in result.rows:
            cells = (f"{row.seconds:.1f}", str(len(row.compiled)), "" if row.hits is None else str(row.hits))
            table.add_row(plain(row.task), draw_mark(mark_warmth(row.verdict), console), *cells)
        console.print(table)
    for row in result.rows:
        if row.verdict is not JitVerdict.WARM:
            _print_row(row, result, verbose=verbose, console=console)
    for path in result.unreported:
        told = f"{path} appeared, and no process told of its compile: the monitor misses that library"
        print_labelled(console, "unreported", draw_sentence(told, "red"), _LABEL)
    for sentence in result.unproven:
        print_labelled(console, "unproven", draw_sentence(sentence, "yellow"), _LABEL)
    console.print()
    _print_notes(result, console)
    opened = f"checked and copied in {result.opened_s:.1f} s"
    print_indented(console, draw_sentence(f"{result.interpreter}; {opened}; {result.seconds:.1f} s in all", "dim"), 0)


def _print_notes(result: JitVerifyResult, console: Console) -> None:
    for row in result.rows:
        if row.unkept:
            print_indented(console, draw_sentence(say_unkept(row), "yellow"), 0)
    for line in result.notes:
        print_indented(console, draw_sentence(line, "yellow"), 0)
    for line in result.left_out:
        print_indented(console, draw_sentence(f"left out, and nothing is said of it: {line}", "yellow"), 0)
    if result.missing:
        without = f"the cache was sealed without: {', '.join(result.missing)}"
        print_indented(console, draw_sentence(without, "yellow"), 0)
    for line in result.unwatched:
        print_indented(console, draw_sentence(f"not a matter of caches: {line}", "dim"), 0)


def _print_row(row: JitVerifyRow, result: JitVerifyResult, *, verbose: bool, console: Console) -> None:
    console.print(draw_mark(mark_warmth(row.verdict), console, row.task))
    print_labelled(console, "why", draw_sentence(say_why(row)), _LABEL)
    shown = row.compiled if verbose else row.compiled[:_MOST_COMPILES]
    for one in shown:
        print_labelled(console, "compiled", draw_sentence(say_compile(one), "red"), _LABEL)
        print_labelled(console, "looked for", draw_sentence(say_looked_for(one, result.folder), "dim"), _LABEL)
    if left := len(row.compiled) - len(shown):
        print_labelled(console, "", draw_sentence(f"{left} more (--verbose lists them)", "dim"), _LABEL)
    for line in row.known:
        print_labelled(console, "it has", draw_sentence(line), _LABEL)
    print_labelled(console, "next", draw_sentence(say_next_step(row, result), "green"), _LABEL)


def _new_table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for heading in headings:
        number = heading in ("seconds", "found")
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    return table
