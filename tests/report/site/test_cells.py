"""Which receipt of a cell counts, and what puts it in doubt: a red one is never hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp_validate.evidence.history import HistoryRow
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.site import cells as cells_module
from megacpp_validate.report.site.cells import CellHistory, arrange_cells

NOW = "2026-11-23T00:00:00+00:00"
STACK = "te2.20.2"
CELL = f"{STACK}-h200-imports"


def row(run: str, outcome: Outcome | None = Outcome.PASS, started: str = "", **more: object) -> HistoryRow:
    values: dict[str, object] = {
        "run": run, "cell": CELL, "stack": STACK, "target": "h200", "probe": "imports", "outcome": outcome,
        "started": started, "commit": "", "image_digest": "", "lock_hash": "", "seconds_total": None,
        "seconds_probe": None, "peak_memory_mib": 0.0, "compiles_after": 0, "sha256": run, "path": f"{run}/a.json",
    }  # fmt: skip
    return HistoryRow(**(values | more))  # type: ignore[arg-type]


GREEN = row("good", started="2026-11-22T10:00:00+00:00")
RED = row("red", Outcome.ERROR)


def arrange(*rows: HistoryRow) -> CellHistory:
    (cells,) = arrange_cells(rows, NOW).values()
    return cells["imports"]


@pytest.mark.parametrize(
    ("other", "tone", "doubt"),
    [
        (replace(RED, started="2026-11-23T01:00:00+00:00"), Tone.RISK, "clock ahead"),
        # As text this is before the report's clock, and as an instant two hours after it.
        (replace(RED, started="2026-11-22T21:00:00-05:00"), Tone.RISK, "clock ahead"),
        # As text this is after the report's clock, and as an instant four hours before it.
        (replace(RED, started="2026-11-23T01:00:00+05:00"), Tone.BAD, ""),
        (replace(RED, started=GREEN.started, run="aa"), Tone.BAD, ""),
        (replace(RED, started="2026-11-22T11:00:00+00:00", run="x/again"), Tone.RISK, "another receipt is red"),
        (replace(RED, started="2026-11-22T09:00:00+00:00", run="good/again"), Tone.RISK, "another receipt is red"),
        (replace(RED, started="2026-11-22T09:00:00+00:00", run="old/again"), Tone.GOOD, ""),
        (replace(RED, started=""), Tone.RISK, "another receipt is red"),
        (replace(RED, started="2026-11-22T09:00:00+00:00"), Tone.GOOD, ""),
        (replace(GREEN, started="2026-11-22T11:00:00+00:00", run="good/again", only_timed=True), Tone.GOOD, ""),
        (replace(GREEN, started="2026-11-23T01:00:00+00:00", run="later"), Tone.GOOD, ""),
        (replace(RED, outcome=None, stack="", target="", probe=""), Tone.RISK, "file lost"),
    ],
)
def test_a_red_receipt_is_not_hidden(other: HistoryRow, tone: Tone, doubt: str) -> None:
    for rows in ((GREEN, other), (other, GREEN)):
        cell = arrange(*rows)
        assert cell.mark.tone is tone
        assert doubt in cell.mark.word
        assert cell.holds == (tone is Tone.GOOD)


@pytest.mark.parametrize(("green", "red"), [("aa", "zz"), ("zz", "aa")])
def test_one_process_with_two_stories_is_never_green(green: str, red: str) -> None:
    cell = arrange(
        replace(GREEN, run=green, contradicts="b"), replace(RED, run=red, started=GREEN.started, contradicts="a")
    )
    assert (cell.mark.tone, cell.mark.word) == (Tone.BAD, "error, contradicted")
    both = arrange(replace(GREEN, run=green, contradicts="b"), replace(GREEN, run=red, contradicts="a"))
    assert both.mark.tone is Tone.RISK


def test_a_run_for_its_times_alone_replaces_no_red_one() -> None:
    timed = replace(GREEN, started="2026-11-22T11:00:00+00:00", run="later", only_timed=True)
    assert arrange(replace(RED, started="2026-11-22T09:00:00+00:00"), timed).mark.tone is Tone.BAD


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("te2.21.0", "te2.21.0.post1"),
        ("te2.21.0", "te2.21.0.1"),
        ("te2.21.0rc1", "te2.21.0"),
        ("te2.9.0", "te2.12.0"),
        ("te2.21.0.dev3", "te2.21.0rc1"),
        ("te2.20.2-of-ours", "te2.21.0"),
        ("native", "te2.9.0"),
    ],
)
def test_the_newest_release_stands_first(older: str, newer: str) -> None:
    rows = [replace(GREEN, stack=name, cell=f"{name}-h200-imports") for name in (older, newer)]
    for listed in (rows, rows[::-1]):
        assert [stack for _, stack in arrange_cells(listed, NOW)] == [newer, older]


def test_a_cell_of_which_only_a_damaged_file_is_left_is_lost() -> None:
    lost = replace(RED, outcome=None, stack="", target="", probe="")
    names = ("te2.21.0-h200-imports", "canary", "te2.1-mars-x", "te2.21.0-gb10-fp8_a")
    rows = [GREEN, *(replace(lost, cell=name, path=f"{name}.json") for name in names)]
    grid = arrange_cells(rows, NOW, ["gb10"])
    assert [(*key, *cells) for key, cells in grid.items()] == [
        ("gb10", "te2.21.0", "fp8_a"),
        ("h200", "te2.21.0", "imports"),
        ("h200", STACK, "imports"),
    ]
    lost_cell = grid["gb10", "te2.21.0"]["fp8_a"]
    assert (lost_cell.outcome, lost_cell.doubt, lost_cell.mark.tone) == (Outcome.NOT_RUN, "file lost", Tone.MISSING)


def test_cells_of_the_newest_stacks_of_each_target_have_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "MOST_STACKS", 1)
    rows = [
        replace(GREEN, stack=f"te2.{n}.0", target=target, cell=f"te2.{n}.0-{target}-imports")
        for n in range(3)
        for target in ("b200", "h200")
    ]
    grid = arrange_cells(rows, NOW)
    shown = {key for key, cells in grid.items() if cells["imports"].has_page}
    assert shown == {("b200", "te2.2.0"), ("h200", "te2.2.0")}
