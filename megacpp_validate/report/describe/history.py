"""Cells over runs in words: one cell in rows, many in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from megacpp_validate.evidence.history import CellHistory, FlakeRate, HistoryResult, HistoryRow
from megacpp_validate.evidence.receipt_time import read_time
from megacpp_validate.evidence.selftest import wilson_interval
from megacpp_validate.text import count

from ..document import Block, Bullets, Details, Document, Heading, Paragraph, Table
from ..marks import Mark, bad, mark_of, missing
from ..marks import quiet as quiet_mark

_HEADINGS: Final = ("run", "outcome", "started", "commit", "stack", "total s", "probe s", "step s", "peak MiB", "late")
_FEW: Final = 4  # cells that are shown in rows


def describe_history(result: HistoryResult, *, last: int = 20, verbose: bool = False) -> Document:
    """Few cells row by row, many as a table.

    Args:
        last: newest rows of each cell that are shown; 0 for all.
        verbose: every cell row by row.
    """
    cells = result.cells
    asked = f"; {count(cells, 'cell')} by the name of {', '.join(result.asked)}" if result.asked else ""
    lost = f"; {count(result.unreadable, 'file')} unreadable" if result.unreadable else ""
    held = f"{count(result.receipts, 'receipt')} in {count(result.runs, 'run')} of {result.store}{lost}{asked}."
    blocks: list[Block] = []
    if len(cells) > _FEW and not verbose:
        rows = tuple(_row_of(cell) for cell in cells)
        blocks.append(Table(("cell", "last", "good", "newest", "flakes"), rows))
    else:
        blocks += [block for cell in cells for block in _describe_cell(cell, last)]
    if result.lost:
        title = f"{count(result.lost, 'file')} that cannot be read, and that belong to no cell above"
        lines = tuple(f"{path}: {why}" for path, why in result.lost.items())
        blocks.append(Details(title, (Bullets(lines),), bad("unreadable")))
    mark = missing("unreadable") if result.exit else quiet_mark("history")
    return Document("History of cells", held, mark, tuple(blocks))


def _describe_cell(cell: CellHistory, last: int) -> list[Block]:
    shown = cell.rows[-last:] if last else cell.rows
    outcomes = Counter(_mark(row).word for row in cell.rows)
    days = sorted({row.started[:10] for row in cell.rows if read_time(row.started)})
    when = f" from {days[0]} to {days[-1]}" if len(days) > 1 else f" on {days[0]}" if days else ""
    words = f"{count(cell.rows, 'receipt')}{when}: {', '.join(f'{n} {word}' for word, n in outcomes.items())}."
    if len(shown) < len(cell.rows):
        words += f" The newest {len(shown)} are shown; --last 0 shows all."
    heading = Heading(cell.cell, mark=_mark_last(cell))
    return [heading, Paragraph(words), *describe_rows(shown), Paragraph(_say_flakes(cell.flakes))]


def describe_rows(shown: Sequence[HistoryRow]) -> Iterator[Block]:
    """A table of receipts without the columns that hold nothing, and what is odd about them."""
    rows: list[tuple[str | Mark, ...]] = [(row.run, _mark(row), *_list_numbers(row)) for row in shown]
    kept = [n for n in range(len(_HEADINGS)) if any(row[n] for row in rows)]
    yield Table(
        tuple(_HEADINGS[n] for n in kept),
        tuple(tuple(row[n] for n in kept) for row in rows),
        numeric=frozenset(place for place, n in enumerate(kept) if n >= 5),
    )
    if notes := tuple(f"{row.run}: {note}" for row in shown for note in _list_notes(row)):
        yield Bullets(notes)


def _mark(row: HistoryRow) -> Mark:
    if row.outcome is None:
        return missing("unreadable")
    return quiet_mark("only timed") if row.only_timed else mark_of(row.outcome)


def _last(cell: CellHistory) -> HistoryRow | None:
    """The newest row that judged its cell and has a time."""
    judged = (row for row in reversed(cell.rows) if row.outcome is not None and not row.only_timed)
    return next((row for row in judged if read_time(row.started)), None)


def _mark_last(cell: CellHistory) -> Mark:
    if (last := _last(cell)) is not None:
        return _mark(last)
    return missing("unreadable" if all(row.outcome is None for row in cell.rows) else "unknown")


def _row_of(cell: CellHistory) -> tuple[str | Mark, ...]:
    judged = [row for row in cell.rows if not row.only_timed]
    passed = sum(row.outcome is not None and row.outcome.is_good for row in judged)
    newest, rate = _last(cell), cell.flakes
    flakes = "" if rate.rate is None else show_rate(rate.flakes, rate.runs)
    ratio = f"{passed} of {len(judged)}"
    return cell.cell, _mark_last(cell), ratio, newest.started[:10] if newest else "", flakes


def _list_numbers(row: HistoryRow) -> tuple[str, ...]:
    numbers = (row.seconds_total, row.seconds_probe, row.step_seconds, row.peak_memory_mib or None)
    shown = ("" if value is None else f"{value:.4g}" for value in numbers)
    late = str(row.compiles_after) if row.compiles_after else ""
    return row.started[:16].replace("T", " "), row.commit[:8], row.environment[:8], *shown, late


def _list_notes(row: HistoryRow) -> list[str]:
    notes = []
    if row.outcome is None:
        notes.append(f"{row.path} is not a valid receipt: {row.fault}")
    elif not row.outcome.is_good and row.reason:
        notes.append(row.reason)
    if row.only_timed:
        notes.append("the module was timed again and not judged; this receipt counts for no rate")
    elif row.outcome is not None and read_time(row.started) is None:
        notes.append("the time of start has no zone, so this receipt is never the newest one")
    if row.same_as:
        notes.append(f"a copy of {row.same_as}, which is not evidence of its own")
    if row.contradicts:
        notes.append(f"this file and {row.contradicts} describe one process differently; neither counts")
    return notes


def _say_flakes(rate: FlakeRate) -> str:
    apart = f" {count(rate.unbound, 'receipt')} without a stack or a clean commit left out." if rate.unbound else ""
    if rate.rate is None:
        return f"Flakes: unknown; no stack ran this cell twice at one commit.{apart}"
    return (
        f"Flakes: {show_rate(rate.flakes, rate.runs)} runs failed where the same stack and commit also passed, in "
        f"{rate.flaky_states} of {count(rate.states, 'state')} that ran more than once.{apart}"
    )


def show_rate(hits: int, trials: int) -> str:
    """Hits of trials, as a share, with what the share may be: the 95% Wilson interval."""
    if not trials:
        return "none ran"
    low, high = wilson_interval(hits, trials)
    return f"{hits} of {trials} ({hits / trials:.1%}; 95% Wilson interval {low:.1%} to {high:.1%})"
