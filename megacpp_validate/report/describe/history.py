"""Cells over runs in words: one cell in rows, many in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from megacpp_validate.evidence.history import CellHistory, HistoryResult, HistoryRow
from megacpp_validate.evidence.receipt import read_time
from megacpp_validate.evidence.selftest import wilson_interval
from megacpp_validate.text import count

from ..document import Block, Bullets, Details, Document, Heading, Paragraph, Table
from ..marks import Mark, mark_of, missing, quiet

_HEADINGS: Final = ("run", "outcome", "started", "commit", "stack", "total s", "probe s", "step s", "peak MiB", "late")
_FEW: Final = 4  # cells that are shown in rows


def describe_history(result: HistoryResult, *, last: int = 20, verbose: bool = False) -> Document:
    """Few cells row by row, many as a table.

    Args:
        last: newest rows of each cell that are shown; 0 for all.
        verbose: every cell row by row.
    """
    cells = result.cells
    blocks: list[Block] = []
    if len(cells) > _FEW and not verbose:
        columns = ("cell", "last", "good", "newest", "flakes")
        blocks.append(Table(columns, tuple(map(_summarize_cell, cells))))
    else:
        for cell in cells:
            name, mark, ratio, newest, flakes = _summarize_cell(cell)
            numbers = f"Good receipts: {ratio}; newest {newest or 'unknown'}; flakes: {flakes or 'unknown'}."
            blocks += [Heading(name, mark=mark), Paragraph(numbers)]
            blocks += describe_rows(cell.rows[-last:] if last else cell.rows)
    lines = tuple(f"{path}: {why}" for path, why in result.lost.items())
    blocks.append(Details("Files that cannot be read, and that belong to no cell above", (Bullets(lines),)))
    mark = missing("unreadable") if result.exit else quiet("history")
    summary = (
        f"{result.store}: {count(result.receipts, 'receipt')} in {count(result.runs, 'run')}, "
        f"{count(result.unreadable, 'unreadable file')}; {count(cells, 'cell')} named {', '.join(result.asked) or '*'}."
    )
    return Document("History of cells", summary, mark, tuple(blocks))


def describe_rows(shown: Sequence[HistoryRow]) -> Iterator[Block]:
    """A table of receipts without the columns that hold nothing, and what is odd about them."""
    rows: list[tuple[str | Mark, ...]] = [(row.run, _mark(row), *_list_numbers(row)) for row in shown]
    kept = [n for n in range(len(_HEADINGS)) if any(row[n] for row in rows)]
    yield Table(
        tuple(_HEADINGS[n] for n in kept),
        tuple(tuple(row[n] for n in kept) for row in rows),
        numeric=frozenset(place for place, n in enumerate(kept) if n >= 5),
    )
    yield Bullets(tuple(f"{row.run}: {note}" for row in shown for note in _list_notes(row)))


def _mark(row: HistoryRow) -> Mark:
    if row.outcome is None:
        return missing("unreadable")
    return quiet("only timed") if row.only_timed else mark_of(row.outcome)


def _summarize_cell(cell: CellHistory) -> tuple[str, Mark, str, str, str]:
    """Name, mark and day of the newest row that judged the cell and has a time; good rows, and flakes."""
    judged = [row for row in cell.rows if not row.only_timed]
    dated = [row for row in judged if row.outcome is not None and read_time(row.started)]
    passed = sum(row.outcome is not None and row.outcome.is_good for row in judged)
    rate = cell.flakes
    flakes = "" if rate.rate is None else show_rate(rate.flakes, rate.runs)
    mark = _mark(dated[-1]) if dated else missing("unknown")
    return cell.cell, mark, f"{passed} of {len(judged)}", dated[-1].started[:10] if dated else "", flakes


def _list_numbers(row: HistoryRow) -> tuple[str, ...]:
    numbers = (row.seconds_total, row.seconds_probe, row.step_seconds, row.peak_memory_mib or None)
    shown = ("" if value is None else f"{value:.4g}" for value in numbers)
    late = str(row.compiles_after or "")
    return row.started[:16].replace("T", " "), row.commit[:8], row.environment[:8], *shown, late


def _list_notes(row: HistoryRow) -> Iterator[str]:
    if row.outcome is None:
        yield f"{row.path} is not a valid receipt: {row.fault}"
    elif not row.outcome.is_good and row.reason:
        yield row.reason
    if row.only_timed:
        yield "the module was timed again and not judged; this receipt counts for no rate"
    elif row.outcome is not None and read_time(row.started) is None:
        yield "the start time has no time zone, so this receipt never counts as the newest"
    if row.same_as:
        yield f"a copy of {row.same_as}, which is not evidence of its own"
    if row.contradicts:
        yield f"this file and {row.contradicts} describe one process differently; neither counts"


def show_rate(hits: int, trials: int) -> str:
    """Hits of trials, as a share, with what the share may be: the 95% Wilson interval."""
    if not trials:
        return "none ran"
    low, high = wilson_interval(hits, trials)
    return f"{hits} of {trials} ({hits / trials:.1%}; 95% Wilson interval {low:.1%} to {high:.1%})"
