"""Pins, locks and fits in Markdown."""

from __future__ import annotations

from ...images.fit_result import FitResult, StackFit
from ...images.lock_result import LockResult
from ..words.lock import mark_fit, mark_lock, mark_pin, say_lock, say_package, say_pin, summarize_fit, summarize_lock
from .text import escape


def tell_lock(result: LockResult) -> list[str]:
    """Every pin and lock, then what changed in each."""
    lines = ["## Pins and locks", "", f"**{escape(summarize_lock(result))}**", ""]
    lines += ["| | what | how |", "| --- | --- | --- |"]
    for pin in result.pins:
        mark = mark_pin(pin)
        lines.append(f"| {mark.symbol} {mark.word} | {escape(pin.reference)} | {escape(say_pin(pin))} |")
    for lock in result.locks:
        mark = mark_lock(lock)
        lines.append(f"| {mark.symbol} {mark.word} | {escape(lock.file)} | {escape(say_lock(lock))} |")
    for lock in result.locks:
        if lock.packages:
            lines += ["", f"### {escape(lock.file)}", ""]
            lines += [f"- {escape(say_package(package))}" for package in lock.packages]
    lines += [line for stack in result.fits for line in _tell_stack(stack)]
    for refusal in result.refusals:
        lines += ["", escape(refusal)]
    return lines


def tell_fit(result: FitResult) -> list[str]:
    """Every need of every stack, worst first."""
    return ["## Whether stacks fit", *(line for stack in result.stacks for line in _tell_stack(stack))]


def _tell_stack(stack: StackFit) -> list[str]:
    lines = ["", f"**{escape(summarize_fit(stack))}**"]
    if stack.fits:
        lines += ["", "| | component | there | wanted | why | next step | known by |", "|" + " --- |" * 7]
    for fit in stack.fits:
        mark = mark_fit(fit.verdict)
        cells = (fit.component, fit.seen, fit.wanted, fit.says, fit.next_step, fit.source)
        lines.append(f"| {mark.symbol} {mark.word} | {' | '.join(escape(cell) for cell in cells)} |")
    return lines
