"""The page of one cell: the receipt that counts in full, and every receipt of the cell in a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.text import count

from ..describe.history import describe_rows
from ..describe.receipt import (
    describe_machine,
    describe_receipt,
    find_doubles,
    find_failed,
    find_fallbacks,
    list_facts,
    tabulate_checks,
)
from ..describe.training import describe_training
from ..document import Block, Details, Document, Heading, Paragraph, Table
from ..marks import bad, good, missing, quiet, risk
from .cells import CellHistory

_MOST_ROWS: Final = 200  # receipts of the history on its page, the newest; the verb `history` has all


def describe_cell(cell: CellHistory, receipt: Receipt | None) -> Document:
    """One cell.

    Args:
        receipt: the one that counts; None where its file cannot be read.
    """
    blocks: list[Block] = (
        [Paragraph(f"The newest receipt cannot be shown: {cell.fault}", missing())] if cell.fault else []
    )
    blocks += [Paragraph(f"`{file}` of this cell is an invalid receipt.", missing()) for file in cell.lost]
    blocks += _describe_newest(cell, receipt) if receipt is not None else ()
    blocks += [Heading("History"), *describe_rows(cell.rows[:_MOST_ROWS])]
    return Document(cell.cell, f"{cell.mark.word.capitalize()}.", cell.mark, tuple(blocks))


def _describe_newest(cell: CellHistory, receipt: Receipt) -> Iterator[Block]:
    row, jit, fell_back = cell.rows[0], receipt.jit, find_fallbacks(receipt)
    yield Paragraph(
        f"Run `{row.run}`, {row.started or 'date unknown'}; {describe_machine(receipt.machine)}; seed {receipt.seed}. "
        f"Requested: {receipt.requested}: {receipt.requested_because}."
    )
    yield Heading("Result")
    yield replace(describe_receipt(receipt), mark=cell.mark)
    if failed := find_failed(receipt):
        yield tabulate_checks(failed, "Checks out of bounds")
    yield Details(f"All {count(receipt.checks, 'check')}", (tabulate_checks(receipt.checks, ""),))
    yield Table(
        ("", "path", "requested", "claimed", "observed", "reasons"),
        tuple(
            (
                risk("fell back") if one in fell_back else quiet(""),
                f"`{one.path}`",
                one.requested,
                one.claimed or "nothing",
                ", ".join(one.observed) or "unknown",
                "; ".join(one.reasons),
            )
            for one in receipt.backends
        ),
        "Backends: requested and observed",
    )
    yield Heading("As loaded")
    yield from (Paragraph(double, risk("second copy")) for double in find_doubles((receipt,)))
    yield Table(("fact", "value"), tuple(list_facts(receipt)))
    yield Heading("Compiled just in time")
    late = sum(jit.after.values())
    numbers = f"{sum(jit.warm_up.values())} up to the second use, {late} after; {sum(jit.hits.values())} from a cache."
    yield Paragraph(numbers, bad("late") if late else good("nothing late"))
    yield from map(Paragraph, jit.notes)
    yield from (Paragraph(f"Not watched: {library}: {why}") for library, why in jit.unwatched.items())
    compiled = tuple(
        (one.when, one.library, f"`{one.kernel}`", one.shape, f"{one.seconds:.2f}") for one in jit.compiled
    )
    kernels = Table(("when", "library", "kernel", "shape", "seconds"), compiled, numeric=frozenset({4}))
    yield Details(f"{count(compiled, 'kernel')} compiled", (kernels,))
    casts = tuple((f"`{one.path}`", one.tensor, one.kind, one.format, one.block) for one in receipt.quantizers)
    yield Table(("path", "operand", "kind", "format", "values that share a scale"), casts, "Cast to low precision")
    times = tuple((f"`{one.name}`", f"{one.median_ms:.4g}", f"{one.spread:.1%}", one.clock) for one in receipt.timings)
    yield Table(("use", "median, ms", "spread of the rounds", "clock"), times, "Timed", frozenset({1, 2}))
    yield from describe_training((record.name, receipt, record) for record in receipt.training)
