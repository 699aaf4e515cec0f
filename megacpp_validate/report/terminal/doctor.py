"""The doctor's answer in a terminal: the stack as loaded, then every difference, worst first."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...environments.doctor_result import Difference, DoctorResult, Weight
from ..ink import draw_mark, draw_sentence, plain, print_indented, print_labelled
from ..words.doctor import (
    mark_package,
    mark_weight,
    say_breaks,
    say_extensions,
    say_folders,
    say_libraries,
    say_machine,
    say_runtimes,
    summarize_doctor,
)

_LABEL: Final = 8


def render_doctor(result: DoctorResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print what is loaded and what differs; every library and compiled file where asked for."""
    console = console or Console()
    console.print(Text(plain(f"The stack as loaded, held against {result.target} and {result.stack}"), "bold"))
    print_indented(console, draw_sentence(summarize_doctor(result)), 0)
    print_indented(console, draw_sentence(say_machine(result.path), "dim"), 0)
    console.print()
    console.print(_draw_packages(result, console))
    for line in say_folders(result):
        print_indented(console, draw_sentence(line, "dim"), 0)
    _print_libraries(result, console)
    for difference in result.differences:
        _print_difference(difference, console, verbose=verbose)
    if verbose:
        _print_extensions(result, console)
    console.print()
    print_indented(console, draw_sentence(f"{result.interpreter}; {result.seconds:.1f} s", "dim"), 0)


def _draw_packages(result: DoctorResult, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name in ("package", "as loaded", "version"):
        table.add_column(name, overflow="fold")
    table.add_column("seconds", justify="right", overflow="fold")
    for look in result.packages:
        seconds = f"{look.seconds:.1f}" if look.installed else ""
        table.add_row(plain(look.package), draw_mark(mark_package(look), console), plain(look.version), seconds)
    return table


def _print_libraries(result: DoctorResult, console: Console) -> None:
    rows = say_libraries(result)
    if rows:
        console.print()
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
        for name in ("mapped library", "says it is"):
            table.add_column(name, overflow="fold")
        table.add_column("files", overflow="fold", ratio=3)
        table.add_column("by import of", overflow="fold", ratio=1)
        for row in rows:
            table.add_row(*map(plain, row))
        console.print(table)
    for line in say_runtimes(result):
        print_indented(console, draw_sentence(f"CUDA runtimes that can be opened by {line}", "yellow"), 0)


def _print_difference(difference: Difference, console: Console, *, verbose: bool) -> None:
    mark = mark_weight(difference.weight)
    console.print()
    title = draw_mark(mark, console).append(f": {plain(difference.subject)}", "bold")
    console.print(title.append(f", {difference.aspect.value}"), soft_wrap=True)
    print_labelled(console, "seen", draw_sentence(difference.seen), _LABEL)
    print_labelled(console, "wanted", draw_sentence(difference.wanted), _LABEL)
    print_labelled(console, "breaks", draw_sentence(say_breaks(difference)), _LABEL)
    print_labelled(console, "next", draw_sentence(difference.next_step, "green"), _LABEL)
    if difference.source and (verbose or difference.weight is Weight.BREAKS):
        print_labelled(console, "known by", draw_sentence(difference.source, "dim"), _LABEL + 1)


def _print_extensions(result: DoctorResult, console: Console) -> None:
    for look in result.packages:
        if lines := say_extensions(look):
            console.print()
            console.print(Text(plain(f"compiled files of {look.package}"), "bold"))
            for line in lines:
                print_indented(console, draw_sentence(line), 4)
