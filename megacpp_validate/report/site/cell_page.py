"""The page of one cell: its newest receipt in full, and every receipt of it in a row."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.text import count, first_sentence

from ..describe.history import describe_rows
from ..describe.receipt import (
    describe_machine,
    describe_receipt,
    find_cause,
    find_doubles,
    find_failed,
    find_fallbacks,
    list_facts,
    show_worst,
    tabulate_checks,
)
from ..describe.training import describe_training
from ..document import Block, Content, Details, Document, Heading, Paragraph, Table, good, missing, risk
from ..document import bad as red
from .history import CellHistory

_MOST_ROWS: Final = 200  # receipts of the history on its page, the newest; the verb `history` has all
_MOST_KERNELS: Final = 100


def describe_cell(history: CellHistory, receipt: Receipt | None) -> Document:
    """One cell.

    Args:
        history: every receipt of the cell.
        receipt: the newest in full; None where its file can no longer be read.
    """
    blocks: list[Block] = []
    if history.fault:
        blocks.append(Paragraph(f"The newest receipt cannot be shown: {history.fault}", missing()))
    if history.future:
        text = f"{count(history.future, 'receipt')} of this cell started after this report: a clock is ahead."
        blocks.append(Paragraph(f"{text} They count last.", risk("clock ahead")))
    blocks += [Paragraph(f"`{file}` of this cell is an invalid receipt.", missing()) for file in history.unreadable[:5]]
    if receipt is not None:
        blocks += _describe_newest(history, receipt)
    blocks += [Heading("History"), *describe_rows(history.rows[:_MOST_ROWS])]
    return Document(history.cell, _summarize(history, receipt), history.mark, tuple(blocks))


def _summarize(history: CellHistory, receipt: Receipt | None) -> str:
    answer = history.mark.word.capitalize()
    if receipt is not None and receipt.reason:
        answer += f": {textwrap.shorten(first_sentence(find_cause(receipt)), 180, placeholder=' …')}"
    elif receipt is not None and receipt.checks:
        answer += f": {count(receipt.checks, 'check')} held"
    earlier = [row for row in history.rows[1:] if not row.same_as]
    wrong = sum(row.outcome is None or not row.outcome.is_good for row in earlier)
    before = f" {wrong} of {count(earlier, 'other receipt')} not good." if wrong else ""
    return f"{answer.rstrip('.')}.{before}"


def _describe_newest(history: CellHistory, receipt: Receipt) -> Iterator[Block]:
    row, worst = history.rows[0], show_worst(receipt)
    yield Paragraph(
        f"Run `{row.run}`, {row.started or 'date unknown'}; {describe_machine(receipt.machine)}; seed {receipt.seed}. "
        f"Requested: {receipt.requested}: {receipt.requested_because}."
    )
    yield Heading("What was seen")
    yield replace(describe_receipt(receipt), mark=history.mark)
    if receipt.checks:
        yield Heading("Checks")
        if failed := find_failed(receipt):
            yield tabulate_checks(failed, "Checks out of bounds")
        closest = f"; the closest is at {worst} of its bound" if worst else ""
        yield Details(f"All {count(receipt.checks, 'check')}{closest}", (tabulate_checks(receipt.checks, ""),))
    if receipt.backends:
        yield Heading("Backends: requested and observed")
        yield _tabulate_backends(receipt)
    yield Heading("As loaded")
    yield from (Paragraph(double, risk("second copy")) for double in find_doubles((receipt,)))
    yield Table(("fact", "value"), tuple(list_facts(receipt)))
    yield Heading("Compiled just in time")
    yield from _describe_jit(receipt)
    if receipt.quantizers:
        casts = tuple((f"`{one.path}`", one.tensor, one.kind, one.format, one.block) for one in receipt.quantizers)
        yield Table(("path", "operand", "kind", "format", "values that share a scale"), casts, "Cast to low precision")
    if receipt.timings:
        times = tuple((f"`{t.name}`", f"{t.median_ms:.4g}", f"{t.spread:.1%}", t.clock) for t in receipt.timings)
        yield Table(("use", "median, ms", "spread of the rounds", "clock"), times, "Timed", frozenset({1, 2}))
    yield from describe_training((record.name, receipt, record) for record in receipt.training)


def _tabulate_backends(receipt: Receipt) -> Table:
    fell_back = find_fallbacks(receipt)
    rows: tuple[tuple[Content, ...], ...] = tuple(
        (
            risk("fell back") if backend in fell_back else "",
            f"`{backend.path}`",
            backend.requested,
            backend.claimed or "nothing",
            ", ".join(backend.observed) or "unknown",
            "; ".join(backend.reasons),
        )
        for backend in receipt.backends
    )
    return Table(("", "path", "requested", "claimed", "observed", "why not another"), rows)


def _describe_jit(receipt: Receipt) -> Iterator[Block]:
    jit = receipt.jit
    late, hits = sum(jit.after.values()), sum(jit.hits.values())
    text = f"{sum(jit.warm_up.values())} up to the second use, {late} in it; {hits} came from a cache on disk."
    yield Paragraph(text, red("late") if late else good("nothing late"))
    for note in (*jit.notes, *(f"Not watched: {library}: {why}" for library, why in jit.unwatched.items())):
        yield Paragraph(note)
    if jit.compiled:
        shown = sorted(jit.compiled, key=lambda one: (one.when != "after", -one.seconds))[:_MOST_KERNELS]
        rows = tuple((one.when, one.library, f"`{one.kernel}`", one.shape, f"{one.seconds:.2f}") for one in shown)
        table = Table(("when", "library", "kernel", "shape", "seconds"), rows, numeric=frozenset({4}))
        yield Details(f"{count(jit.compiled, 'kernel')} compiled", (table,))
