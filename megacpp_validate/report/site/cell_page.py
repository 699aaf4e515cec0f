"""The page of one cell: its newest receipt in full, and every receipt of it in a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.text import count, first_sentence

from ..describe.receipt import (
    count_checks,
    describe_fallback,
    describe_machine,
    describe_next_step,
    find_cause,
    find_failed,
    find_fallbacks,
    show_worst,
    tabulate_checks,
)
from ..describe.training import describe_training
from ..document import (
    Block,
    Content,
    Details,
    Diagnostic,
    Document,
    Heading,
    Mark,
    Paragraph,
    Preformatted,
    Table,
    good,
    missing,
    quiet,
    risk,
)
from ..document import bad as red
from .history import CellHistory

MOST_ROWS: Final = 200  # receipts of the history on its page, the newest; the verb `history` has all
_MOST_KERNELS: Final = 100
_LONGEST: Final = 180  # characters of a reason in the summary; the page has all of it below


def describe_cell(history: CellHistory, receipt: Receipt | None) -> Document:
    """One cell.

    Args:
        history: every receipt of the cell.
        receipt: the newest in full; None where its file can no longer be read.
    """
    blocks: list[Block] = list(_describe_doubts(history))
    if receipt is not None:
        blocks += _describe_receipt(history, receipt)
    blocks += [Heading("History"), _tabulate_history(history)]
    return Document(history.cell, _summarize(history, receipt), history.mark, tuple(blocks))


def _summarize(history: CellHistory, receipt: Receipt | None) -> str:
    word = f"{history.mark.word[0].upper()}{history.mark.word[1:]}"
    if receipt is not None and receipt.reason:
        reason = first_sentence(find_cause(receipt))
        word += f": {reason if len(reason) <= _LONGEST else reason[:_LONGEST].rpartition(' ')[0] + ' …'}"
    elif receipt is not None and receipt.checks:
        word += f": {count(receipt.checks, 'check')} held"
    earlier = [row for row in history.rows[1:] if not row.same_as]
    wrong = sum(row.outcome is None or not row.outcome.is_good for row in earlier)
    before = f" {wrong} of {count(earlier, 'other receipt')} not good." if wrong else ""
    return f"{word.rstrip('.')}.{before}"


def _describe_doubts(history: CellHistory) -> Iterator[Block]:
    if history.fault:
        yield Paragraph(f"The newest receipt cannot be shown: {history.fault}", missing())
    if history.future:
        receipts = count(history.future, "receipt")
        yield Paragraph(
            f"{receipts} of this cell started after this report: a clock is ahead. They count last.", risk("")
        )
    for file in history.unreadable[:5]:
        yield Paragraph(f"`{file}` is named after this cell and is an invalid receipt.", missing())
    for row in history.rows:
        if row.contradicts:
            yield Paragraph(f"`{row.path}` and `{row.contradicts}` claim one process and differ.", risk("contradicted"))


def _describe_receipt(history: CellHistory, receipt: Receipt) -> Iterator[Block]:
    row = history.rows[0]
    yield Paragraph(f"Run `{row.run}`, {row.started or 'date unknown'}; {describe_machine(receipt.machine)}; "
                    f"seed {receipt.seed}.")  # fmt: skip
    failure = receipt.failure
    fields: list[tuple[str, Content]] = [
        ("blocked by", receipt.blocked_by),
        ("raised", f"`{failure.type}`{f' at `{failure.frame}`' if failure.frame else ''}" if failure else ""),
        *(("fell back", describe_fallback(backend)) for backend in find_fallbacks(receipt)),
        ("requested", f"{receipt.requested}: {receipt.requested_because}".removesuffix(": ")),
        ("checks", f"{count_checks(receipt)} held" if receipt.checks else ""),
        ("closest", f"{show_worst(receipt)} of its bound" if show_worst(receipt) else ""),
        *(("retried", retry) for retry in receipt.retries),
    ]
    yield Heading("What was seen")
    cause, step = find_cause(receipt), describe_next_step(receipt)
    yield Diagnostic(receipt.probe, history.mark, message=cause, fields=tuple(fields), help=step)
    if failure and failure.traceback:
        yield Details("Traceback", (Preformatted(failure.traceback),))
    if receipt.checks:
        yield Heading("Checks")
        if failed := find_failed(receipt):
            yield tabulate_checks(failed, "Checks out of bounds")
        held = [check for check in receipt.checks if check.passed]
        word = "The other" if failed else "All"
        yield Details(
            f"{word} {count(held, 'check')}, with what was observed and allowed", (tabulate_checks(held, ""),)
        )
    yield from _describe_stack(receipt)
    if receipt.training:
        yield Heading("Training")
        yield from describe_training((record.name, receipt, record) for record in receipt.training)


def _describe_stack(receipt: Receipt) -> Iterator[Block]:
    if receipt.backends:
        fell_back = find_fallbacks(receipt)
        rows: list[tuple[Content, ...]] = []
        for backend in receipt.backends:
            mark = risk("fell back") if backend in fell_back else good("as requested")
            if backend not in fell_back and backend.requested and backend.requested != backend.claimed:
                mark = quiet("another, as it may")
            seen = ", ".join(backend.observed) or "unknown"
            why = "; ".join(backend.reasons)
            rows.append((mark, f"`{backend.path}`", backend.requested, backend.claimed or "nothing", seen, why))
        columns = ("", "path", "requested", "claimed", "observed", "why not another")
        yield Heading("Backends: requested and observed")
        yield Table(columns, tuple(rows))
    yield Heading("As loaded")
    yield _tabulate_loaded(receipt)
    yield _tabulate_identity(receipt)
    yield Heading("Compiled just in time")
    yield from _describe_jit(receipt)
    if receipt.quantizers:
        yield Heading("Cast to low precision")
        casts = tuple((f"`{one.path}`", one.tensor, one.kind, one.format, one.block) for one in receipt.quantizers)
        yield Table(("path", "operand", "kind", "format", "values that share a scale"), casts)
    if receipt.timings:
        yield Heading("Timed")
        times = tuple((f"`{t.name}`", f"{t.median_ms:.4g}", f"{t.spread:.1%}", t.clock) for t in receipt.timings)
        yield Table(("use", "median, ms", "spread of the rounds", "clock"), times, numeric=frozenset({1, 2}))


def _tabulate_loaded(receipt: Receipt) -> Table:
    rows: list[tuple[Content, ...]] = []
    for package in receipt.packages:
        kind: str | Mark = risk("second copy") if package.other_copies else "package"
        files = tuple(f"`{file}`" for file in (package.file, *package.other_copies))
        rows.append((kind, package.name, package.version or "unknown", files))
    for library in receipt.libraries:
        kind = risk("second copy") if len(library.files) > 1 else "library"
        rows.append((kind, library.name, library.version or "unknown", tuple(f"`{file}`" for file in library.files)))
    return Table(("", "name", "version", "files"), tuple(rows))


def _tabulate_identity(receipt: Receipt) -> Table:
    known = {
        "schema": receipt.schema_id,
        "image digest": receipt.image_digest,
        "lock hash": receipt.lock_hash,
        "environment": receipt.environment,
        "commit": receipt.commit,
        "tool": receipt.tool,
        "compilers": ", ".join(f"{one.library} by {one.mode}" for one in receipt.compilers),
    }
    return Table(("identity", "value"), tuple((name, f"`{value}`") for name, value in known.items() if value))


def _describe_jit(receipt: Receipt) -> Iterator[Block]:
    jit = receipt.jit
    late, hits = sum(jit.after.values()), sum(jit.hits.values())
    libraries = ", ".join(f"{library} {number}" for library, number in sorted(jit.warm_up.items()) if number)
    text = f"{sum(jit.warm_up.values())} up to the second use{f' ({libraries})' if libraries else ''}, {late} in it"
    text += f"; {hits} came from a cache on disk" if hits else ""
    yield Paragraph(f"{text}.", red("late") if late else good("nothing late"))
    for note in (*jit.notes, *(f"Not watched: {library}: {why}" for library, why in jit.unwatched.items())):
        yield Paragraph(note)
    if jit.compiled:
        shown = sorted(jit.compiled, key=lambda one: (one.when != "after", -one.seconds))[:_MOST_KERNELS]
        rows = tuple((one.when, one.library, f"`{one.kernel}`", one.shape, f"{one.seconds:.2f}") for one in shown)
        table = Table(("when", "library", "kernel", "shape", "seconds"), rows, numeric=frozenset({4}))
        yield Details(f"{count(jit.compiled, 'kernel')} compiled", (table,))


def _tabulate_history(history: CellHistory) -> Table:
    rows: list[tuple[Content, ...]] = []
    for row in history.rows[:MOST_ROWS]:
        outcome = row.outcome.value if row.outcome else "invalid"
        copied = f", copy of `{row.same_as}`" if row.same_as else ""
        seconds = (row.seconds_probe, row.seconds_total, row.step_seconds, row.peak_memory_mib or None)
        numbers = ("" if value is None else f"{value:,.4g}" for value in seconds)
        rows.append((f"{outcome}{copied}", row.started[:19] or "unknown", f"`{row.run}`", *numbers, row.commit[:10]))
    columns = ("outcome", "started", "run", "probe, s", "whole, s", "step, s", "memory, MiB", "commit")
    return Table(columns, tuple(rows), numeric=frozenset({3, 4, 5, 6}))
