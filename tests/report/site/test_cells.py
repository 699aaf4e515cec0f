"""Which receipt of a cell counts, and what puts it in doubt: a red one is never hidden."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_validate.evidence.history import HistoryRow
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.site.cells import Cell, arrange_cells

STACK = "te2.20.2"
CELL = f"{STACK}-h200-imports"
GREEN = HistoryRow(
    run="good", cell=CELL, path="good/a.json", stack=STACK, target="h200", probe="imports", outcome=Outcome.PASS,
    started="2026-11-22T10:00:00+00:00", seconds={"probe": 1.0},
)  # fmt: skip


def changed(row: HistoryRow, **fields: Any) -> HistoryRow:
    return row.model_copy(update=fields)


RED = changed(GREEN, run="red", path="red/a.json", outcome=Outcome.ERROR, started="")


def arrange(*rows: HistoryRow) -> Cell:
    (cell,) = arrange_cells([rows])
    return cell


@pytest.mark.parametrize(
    ("other", "tone", "doubt"),
    [
        (changed(RED, started="2026-11-23T01:00:00+00:00"), Tone.BAD, ""),
        # As text this is before the green one, and as an instant ten hours after it.
        (changed(RED, started="2026-11-22T09:00:00-11:00"), Tone.BAD, ""),
        (changed(RED, started="2026-11-22T11:00:00+05:00"), Tone.GOOD, ""),
        (changed(RED, started=GREEN.started, run="aa"), Tone.BAD, ""),
        (changed(RED, started=""), Tone.MISSING, "another receipt is red"),
        (changed(RED, started="2026-11-22T09:00:00+00:00"), Tone.GOOD, ""),
        (changed(GREEN, started="2026-11-22T11:00:00+00:00", run="good/again", seconds={"total": 1.0}), Tone.GOOD, ""),
        (changed(RED, outcome=None, stack="", target="", probe=""), Tone.MISSING, "file lost"),
        (changed(GREEN, started=""), Tone.GOOD, ""),
    ],
)
def test_a_red_receipt_is_not_hidden(other: HistoryRow, tone: Tone, doubt: str) -> None:
    for rows in ((GREEN, other), (other, GREEN)):
        cell = arrange(*rows)
        assert (cell.mark.tone, doubt in cell.mark.word, cell.holds) == (tone, True, tone is Tone.GOOD)


def test_a_run_for_its_times_alone_replaces_no_red_one() -> None:
    timed = changed(GREEN, started="2026-11-22T11:00:00+00:00", run="later", seconds={"total": 1.0})
    assert arrange(changed(RED, started="2026-11-22T09:00:00+00:00"), timed).mark.tone is Tone.BAD


def test_a_file_that_is_lost_stands_for_nothing() -> None:
    assert arrange_cells([(changed(RED, outcome=None, stack="", target="", probe=""),)]) == []


@pytest.mark.parametrize(
    ("older", "newer"),
    [("te2.21.0", "te2.21.0.post1"), ("te2.21.0rc1", "te2.21.0"), ("te2.9.0", "te2.12.0"), ("native", "te2.9.0"),
     ("te2.20.2-of-ours", "te2.21.0")],
)  # fmt: skip
def test_the_newest_release_stands_first(older: str, newer: str) -> None:
    cells = [(changed(GREEN, stack=name, cell=f"{name}-h200-imports"),) for name in (older, newer)]
    for listed in (cells, cells[::-1]):
        assert [cell.stack for cell in arrange_cells(listed)] == [newer, older]
