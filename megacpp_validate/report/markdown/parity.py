"""A parity session and the support grid in Markdown: the page of a run, and the README's grid."""

from __future__ import annotations

from ...environments.session_result import SessionResult, SupportGrid
from ..marks import mark_cell
from ..summaries import first_sentence
from ..words.checks import say_parts
from ..words.loss import find_failed_losses, find_losses, mark_loss, say_loss
from ..words.parity import (
    find_doubles,
    find_failed,
    find_fallbacks,
    find_machine,
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
from ..words.smoke import HEADINGS, find_trained, say_row
from .text import escape


def tell_session(result: SessionResult) -> list[str]:
    """A session: a row a probe, then what is red."""
    lines = [f"## {say_subject(result)} of {escape(result.stack)} on {escape(result.target)}", ""]
    lines += [f"**{escape(summarize_session(result))}**", ""]
    lines += [f"Requested: {escape(result.requested)}. {escape(result.requested_because)}.", ""]
    lines += [f"{escape(say_machine(find_machine(result)))}; seed {result.seed}.", ""]
    lines += [f"{escape(double)}\n" for double in find_doubles(result)]
    lines += [
        "| probe | outcome | requested: seen | checks | worst | seconds |",
        "| --- | --- | --- | --: | --: | --: |",
    ]
    for receipt in result.receipts:
        mark = mark_cell(receipt.outcome)
        seconds = f"{receipt.seconds['total']:.1f}" if "total" in receipt.seconds else ""
        cells = (say_backends(receipt), say_checks(receipt), say_worst(receipt), seconds)
        row = " | ".join(escape(cell) for cell in cells)
        lines.append(f"| {escape(receipt.probe)} | {mark.symbol} {mark.word} | {row} |")
    if trained := find_trained(result):
        lines += ["", f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
        lines += [f"| {' | '.join(map(escape, say_row(one)))} |" for one in trained]
    for receipt in result.receipts:
        fallbacks = find_fallbacks(receipt)
        if receipt.outcome.is_good and not fallbacks:
            continue
        lines += ["", f"### {escape(receipt.probe)}: {mark_cell(receipt.outcome).word}", ""]
        lines.append(escape(say_cause(receipt)))
        for check in find_failed(receipt):
            lines.append(f"- **{escape(check.name)}**")
            lines += [f"  - {escape(line)}" for line in say_parts(check)]
        lines += [f"- fell back: {escape(say_fallback(backend))}" for backend in fallbacks]
        if step := say_next_step(receipt):
            lines.append(f"- next: {escape(step)}")
    for verdict in find_losses(result):
        mark = mark_loss(verdict)
        lines += ["", f"### loss gate, {escape(verdict.recipe or 'no recipe')}: {mark.symbol} {mark.word}", ""]
        lines.append(f"{escape(say_loss(verdict))}.")
        for check in find_failed_losses(verdict):
            lines += [f"- **{escape(check.name)}**", *(f"  - {escape(line)}" for line in say_parts(check))]
    return lines


def tell_support(grid: SupportGrid) -> list[str]:
    """The grid of stacks x modules, and below it why a cell is not good."""
    lines = [f"**{escape(summarize_support(grid))}**", ""]
    lines += [f"| stack | target | {' | '.join(escape(module) for module in grid.modules)} |"]
    lines += ["| --- | --- |" + " --- |" * len(grid.modules)]
    for row in grid.rows:
        marks = (mark_cell(cell.outcome) for cell in row.cells)
        cells = " | ".join(f"{mark.symbol} {mark.word}" for mark in marks)
        lines.append(f"| {escape(row.stack)} | {escape(row.target)} | {cells} |")
    for row in grid.rows:
        lines += ["", f"{escape(row.stack)} on {escape(row.target)}: {escape(say_where(row))}.", ""]
        lines += [
            f"- {escape(cell.module)}: {mark_cell(cell.outcome).word}: {escape(first_sentence(cell.reason))}"
            for cell in row.cells
            if not cell.outcome.is_good
        ]
    lines += [f"\nnot read: {escape(file)}: {escape(reason)}" for file, reason in grid.unreadable.items()]
    return lines
