"""Pins, locks and fits in a terminal: what changed, line by line."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from ...images.fit_result import FitResult, FitVerdict, StackFit
from ...images.lock_result import LockResult
from ..ink import draw_mark, draw_sentence, plain, print_indented, print_labelled
from ..words.lock import (
    mark_fit,
    mark_lock,
    mark_pin,
    say_fit,
    say_lock,
    say_package,
    say_pin,
    summarize_fit,
    summarize_lock,
)

_LABEL: Final = 12
_SHOWN: Final = (FitVerdict.REFUSED, FitVerdict.UNKNOWN)


def render_lock(result: LockResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print what became of every pin and lock; packages that changed, each on a line."""
    console = console or Console()
    for pin in result.pins:
        console.print(draw_mark(mark_pin(pin), console, plain(pin.reference)), soft_wrap=True)
        print_indented(console, draw_sentence(say_pin(pin), "dim"), 4)
    for lock in result.locks:
        console.print(draw_mark(mark_lock(lock), console, plain(lock.file)), soft_wrap=True)
        print_indented(console, draw_sentence(say_lock(lock), "dim"), 4)
        for package in lock.packages:
            console.print(Text(f"      {plain(say_package(package))}"), soft_wrap=True)
    for stack in result.fits:
        _print_stack(stack, console, verbose=verbose, shown=(FitVerdict.REFUSED,))
    for refusal in result.refusals:
        console.print()
        print_indented(console, draw_sentence(refusal, "red"), 0)
    console.print()
    print_indented(console, draw_sentence(summarize_lock(result), "bold"), 0)


def render_fit(result: FitResult, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print every need that is not met or not known, and all of them where asked for."""
    console = console or Console()
    for stack in result.stacks:
        _print_stack(stack, console, verbose=verbose)


def _print_stack(stack: StackFit, console: Console, *, verbose: bool, shown: tuple[FitVerdict, ...] = _SHOWN) -> None:
    worst = stack.fits[0].verdict if stack.fits else FitVerdict.FITS
    first = draw_mark(mark_fit(worst), console).append(": ")
    console.print(first.append_text(draw_sentence(summarize_fit(stack))), soft_wrap=True)
    for fit in stack.fits:
        if not verbose and fit.verdict not in shown:
            continue
        print_labelled(console, mark_fit(fit.verdict).symbol if verbose else "", draw_sentence(say_fit(fit)), 2)
        if fit.verdict is FitVerdict.REFUSED:
            print_labelled(console, "  breaks", draw_sentence(", ".join(fit.breaks) or "the stack"), _LABEL)
        if fit.verdict in _SHOWN:
            print_labelled(console, "  next", draw_sentence(fit.next_step, "green"), _LABEL)
            print_labelled(console, "  known by", draw_sentence(fit.source, "dim"), _LABEL)
