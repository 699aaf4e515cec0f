"""A parity session and the support grid in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megacpp_validate.evidence.receipt import Check, Outcome, Receipt

from ...environments.session_result import SessionResult, SupportGrid
from ...gate.loss_result import LossVerdict
from ..ink import draw_mark, draw_sentence, plain, print_indented, print_labelled
from ..marks import mark_cell
from ..summaries import count, first_sentence
from ..words.checks import say_parts
from ..words.loss import find_failed_losses, find_losses, mark_loss, say_loss
from ..words.parity import (
    find_doubles,
    find_failed,
    find_fallbacks,
    find_machine,
    find_worst,
    say_backends,
    say_cause,
    say_checks,
    say_fallback,
    say_machine,
    say_next_step,
    say_subject,
    say_where,
    say_worst,
    summarize_session,
    summarize_support,
)
from ..words.smoke import COMPARED, HEADINGS, Trained, find_trained, say_row

_LABEL: Final = 10
_MOST_FAILED: Final = 12  # checks of one probe that are told without --verbose


def render_session(result: SessionResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print one row a probe, and below it every red one in full; all checks where asked for."""
    console = console or Console()
    console.print(Text(plain(f"{say_subject(result)} of {result.stack} on {result.target}"), "bold"))
    print_indented(console, draw_sentence(summarize_session(result)), 0)
    print_indented(console, draw_sentence(f"requested: {result.requested}. {result.requested_because}.", "dim"), 0)
    print_indented(console, draw_sentence(f"{say_machine(find_machine(result))}; seed {result.seed}", "dim"), 0)
    for double in find_doubles(result):
        print_indented(console, draw_sentence(double, "yellow"), 0)
    console.print()
    console.print(_draw_table(result, console))
    if trained := find_trained(result):
        _print_trained(trained, console)
    nothing_ran = all(receipt.outcome is Outcome.NOT_RUN for receipt in result.receipts)
    for receipt in result.receipts[:1] if nothing_ran else result.receipts:
        if verbose or not receipt.outcome.is_good or find_fallbacks(receipt):
            _print_cell(receipt, verbose=verbose, console=console)
    for verdict in find_losses(result):
        _print_loss(verdict, verbose=verbose, console=console)
    console.print()
    end = f"{result.interpreter}; {result.seconds:.1f} s"
    print_indented(console, draw_sentence(end, "dim"), 0)
    if result.folder:
        print_indented(console, draw_sentence(f"receipts and logs: {result.folder}", "dim"), 0)


def render_support(grid: SupportGrid, *, console: Console | None = None) -> None:
    """Print the grid of stacks x modules, and the reason of each cell that is not good."""
    console = console or Console()
    console.print(Text("Support, as receipts show it", "bold"))
    print_indented(console, draw_sentence(summarize_support(grid)), 0)
    if grid.rows:
        console.print()
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
        for name in ("stack", "target", *(module.replace("_", "_\n") for module in grid.modules)):
            table.add_column(plain(name), overflow="fold")
        for row in grid.rows:
            cells = (draw_mark(mark_cell(cell.outcome), console) for cell in row.cells)
            table.add_row(plain(row.stack), plain(row.target), *cells)
        console.print(table)
    for row in grid.rows:
        console.print()
        name = f"{row.stack} on {row.target}"
        print_indented(console, draw_sentence(name, "bold") + draw_sentence(f": {say_where(row)}", "dim"), 0)
        for cell in row.cells:
            if not cell.outcome.is_good:
                print_labelled(console, cell.module, draw_sentence(first_sentence(cell.reason)), 15)
    for file, reason in grid.unreadable.items():
        print_indented(console, draw_sentence(f"not read: {file}: {reason}", "yellow"), 0)


def _draw_table(result: SessionResult, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("probe", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("requested: seen", overflow="fold")
    table.add_column("checks", justify="right", no_wrap=True)
    table.add_column("worst", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for receipt in result.receipts:
        table.add_row(
            plain(receipt.probe),
            draw_mark(mark_cell(receipt.outcome), console),
            plain(say_backends(receipt)),
            say_checks(receipt),
            say_worst(receipt),
            f"{receipt.seconds['total']:.1f}" if "total" in receipt.seconds else "",
        )
    return table


def _print_trained(trained: Sequence[Trained], console: Console) -> None:
    """A table of what is compared, and below it what each run was of: all in one is too wide for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for heading in COMPARED:
        text = heading in ("cell", "plan")
        table.add_column(heading, overflow="fold", no_wrap=heading != "plan", justify="left" if text else "right")
    rows = [dict(zip(HEADINGS, say_row(one), strict=True)) for one in trained]
    for row in rows:
        table.add_row(*(plain(row[heading]) for heading in COMPARED))
    console.print()
    console.print(table)
    console.print()
    for row in rows:
        said = ", ".join(f"{name} {row[name]}" for name in HEADINGS if name not in COMPARED and row[name])
        print_indented(console, draw_sentence(f"{row['cell']}: {said}", "dim"), 0)


def _print_cell(receipt: Receipt, *, verbose: bool, console: Console) -> None:
    console.print()
    console.print(draw_mark(mark_cell(receipt.outcome), console, receipt.probe))
    if receipt.reason:
        print_labelled(console, "why", draw_sentence(say_cause(receipt)), _LABEL)
    if receipt.failure is not None and receipt.failure.frame:
        print_labelled(console, "at", draw_sentence(receipt.failure.frame, "cyan"), _LABEL)
    failed = find_failed(receipt)
    shown = receipt.checks if verbose else failed[:_MOST_FAILED]
    for check in shown:
        _print_check(check, verbose=verbose, console=console)
    if left := (0 if verbose else len(failed) - len(shown)):
        sentence = f"{count(left, 'more failed check')} (--verbose lists them)"
        print_labelled(console, "", draw_sentence(sentence, "dim"), _LABEL)
    for backend in find_fallbacks(receipt):
        print_labelled(console, "fell back", draw_sentence(say_fallback(backend), "yellow"), _LABEL)
    if verbose:
        _print_details(receipt, console)
    if step := say_next_step(receipt):
        print_labelled(console, "next", draw_sentence(step, "green"), _LABEL)


def _print_loss(verdict: LossVerdict, *, verbose: bool, console: Console) -> None:
    console.print()
    console.print(draw_mark(mark_loss(verdict), console, f"loss gate, {verdict.recipe or 'no recipe'}"))
    print_labelled(console, "why", draw_sentence(say_loss(verdict)), _LABEL)
    for check in verdict.checks if verbose else find_failed_losses(verdict):
        _print_check(check, verbose=verbose, console=console)


def _print_check(check: Check, *, verbose: bool, console: Console) -> None:
    label = "held" if check.passed else "out"
    print_labelled(console, label, draw_sentence(check.name, "" if check.passed else "bold red"), _LABEL)
    for line in say_parts(check, all_parts=verbose):
        print_labelled(console, "", draw_sentence(line, "dim" if check.passed else ""), _LABEL)


def _print_details(receipt: Receipt, console: Console) -> None:
    """What a person asks for next: where the closest call was, what was compiled, how long each part took."""
    if (worst := find_worst(receipt)) is not None:
        told = f"{worst.check}, {worst.part}: {worst.ratio:.2f} of its bound"
        print_labelled(console, "worst", draw_sentence(told), _LABEL)
    for label, compiles in (("compiled", receipt.jit.warm_up), ("later", receipt.jit.after)):
        if compiles:
            told = ", ".join(f"{number} by {name}" for name, number in compiles.items())
            print_labelled(console, label, draw_sentence(told), _LABEL)
    told = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in receipt.seconds.items())
    print_labelled(console, "seconds", draw_sentence(told), _LABEL)
    print_labelled(console, "memory", draw_sentence(f"{receipt.peak_memory_mib:.0f} MiB at most"), _LABEL)
