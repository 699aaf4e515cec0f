"""The verb of cells over runs: what it tells, in each form, and its exit codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from megacpp_validate.cli.gate import history_verbs
from megacpp_validate.cli.gate.history_runs import find_database
from megacpp_validate.evidence.history import Direction, HistoryResult
from megacpp_validate.evidence.receipt import Outcome
from tests.command_line import Run, make_run
from tests.stored_receipts import make_receipt, put

assert history_verbs.history  # registered by its import
OPEN, WRONG, NOTHING, MISSING, INFRASTRUCTURE = 0, 2, 3, 4, 6
CELL = "te2.20.2-h200-attention"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("MEGACPP_CACHE_DIR", str(tmp_path / "cache"))
    return make_run(capfd, monkeypatch, "history")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Eight runs of a cell that gets slower, with one flake; one of another stack."""
    folder = tmp_path / "store"
    for number in range(8):
        outcome = Outcome.FAIL if number == 3 else Outcome.PASS
        seconds = {"probe": 2.0, "total": 10.0 + number}
        put(
            folder,
            f"run-{number}",
            make_receipt(outcome),
            started=f"2026-11-0{number + 1}T10:00:00+00:00",
            seconds=seconds,
        )
    put(folder, "run-0", make_receipt(stack="te2.17.1"))
    return folder


def test_a_cell_is_told_over_its_runs(run: Run, store: Path) -> None:
    said = run(store, "--cell", CELL)
    assert said.code == OPEN
    assert "9 receipts in 8 runs" in said.flat
    assert "8 receipts from 2026-11-01 to 2026-11-08: 7 pass, 1 fail. Last: pass." in said.flat
    assert "run-3: it ended with fail" in said.flat
    assert "seconds_total rising" in said.flat
    assert "seconds_probe: 2 s in 7 runs." in said.flat
    assert "1 of 8 runs (12.5%; 95% Wilson 2.2% to 47.1%)" in said.flat
    assert "te2.17.1" not in said.out
    assert find_database(store).is_file()
    assert run(store, "--cell", CELL, "--rebuild") == said
    assert "The newest 2 of 8" in run(store, "--cell", CELL, "--last", 2).flat


def test_only_timed_and_undated_receipts_are_told_and_never_the_last(run: Run, store: Path) -> None:
    put(store, "again", started="2026-11-21T08:00:00+00:00", seconds={"speed": 1.0, "total": 9.0})
    put(store, "undated", make_receipt(Outcome.ERROR), started="", commit="d" * 40)
    said = run(store, "--cell", CELL)
    assert "10 receipts from 2026-11-01 to 2026-11-21: 7 pass, 1 fail, 1 only timed, 1 error. Last: pass." in said.flat
    assert "again: it timed its module again" in said.flat
    assert "undated: it does not say when it started" in said.flat
    assert "seconds_probe: 2 s in 7 runs." in said.flat
    assert "1 of 8 runs (12.5%" in said.flat  # as without them
    put(store, "again", make_receipt(probe="permute"), started="2026-11-21T08:00:00+00:00", seconds={"speed": 1.0})
    put(store, "undated", make_receipt(probe="gemm"), started="2026-11-21T08:00:00")
    page = run(store, "--format", "markdown").out
    assert f"| {CELL} | pass | 7 of 9 | 2026-11-08 |" in page
    assert "| te2.20.2-h200-permute | unknown | 0 of 0 |  |" in page
    assert "| te2.20.2-h200-gemm | unknown | 1 of 1 |  |" in page
    put(store, "undated", make_receipt(probe="moe"), started="2026-11-21T08:00:00")
    assert "te2.20.2-h200-gemm ? unknown 1 of 1" in run(store).flat  # five cells: a line each


def test_every_cell_is_told_without_a_name(run: Run, store: Path) -> None:
    said = run(store)
    assert (said.code, "te2.17.1-h200-attention" in said.out, CELL in said.out) == (OPEN, True, True)
    for number in range(4):
        put(store, "more", make_receipt(probe=f"probe_{number}"))
    table = run(store)
    assert "7 of 8" in table.flat  # one line a cell
    assert "run-3: it ended" not in table.flat
    assert "run-3: it ended" in run(store, "--verbose").flat


def test_json_is_the_result_and_markdown_the_words(run: Run, store: Path) -> None:
    data = json.loads(run(store, "--cell", "te2.20*", "--quantity", "seconds_*", "--format", "json").out)
    result = TypeAdapter(HistoryResult).validate_json(json.dumps(data))
    (cell,) = result.cells
    assert [row.run for row in cell.rows] == [f"run-{number}" for number in range(8)]
    assert all(row.validated for row in cell.rows)
    assert {trend.quantity: trend.direction for trend in cell.trends} == {
        "seconds_probe": Direction.STEADY, "seconds_total": Direction.RISING,
    }  # fmt: skip
    assert (cell.flakes.flakes, cell.flakes.runs) == (1, 8)
    page = run(store, "--cell", CELL, "--format", "markdown").out
    assert f"### {CELL}" in page
    assert "| run-3 | ✗ fail | 2026-11-04 10:00 |" in page
    assert run(store, "--format", "junit").code == WRONG


def test_what_is_unreadable_is_told_and_never_left_out(run: Run, store: Path) -> None:
    (store / "run-5" / f"{CELL}.json").write_text('{"cell": ')
    (store / "run-5" / "te2.9.0-h200-<b>permute.json").write_text("{")
    (store / "run-5" / "x\n\x1b[31m✓ pass.json").write_text("{")
    said = run(store, "--cell", CELL)
    assert said.code == OPEN
    assert "6 pass, 1 fail, 1 unreadable" in said.flat
    assert f"run-5/{CELL}.json is no receipt" in said.flat
    assert "2 files of the store that no receipt can be read from" in said.flat
    assert "\x1b" not in said.out
    assert "run-5/x [31m✓ pass.json" in said.out  # on one line
    page = run(store, "--cell", CELL, "--format", "markdown").out
    assert "<b>" not in page
    assert "&#60;b&#62;permute" in page
    lost = run(store, "--cell", "te2.9.0*")
    assert (lost.code, "is no receipt" in lost.flat) == (MISSING, True)


def test_an_edited_check_is_found_when_its_cell_is_asked_for(run: Run, store: Path) -> None:
    path = store / "run-0" / f"{CELL}.json"
    path.write_text(path.read_text().replace('"observed": 0.001', '"observed": 0.5'))
    assert "8 of 8" not in run(store).flat
    assert "0.5 is beyond its bound" in run(store, "--cell", CELL).flat


def test_exit_codes(run: Run, store: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "nowhere").code == run(tmp_path / ("x" * 300)).code == WRONG
    assert "Next step" in run(tmp_path / "nowhere").err
    nothing = run(store, "--cell", "te2.20.2-b200-*")
    assert (nothing.code, "no cell of" in nothing.err) == (NOTHING, True)
    assert run(store, "--cell", "").code == NOTHING
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty").code == NOTHING


def test_no_file_that_is_no_index_is_written_over(run: Run, store: Path, tmp_path: Path) -> None:
    receipt = store / "run-0" / f"{CELL}.json"
    notes, linked, pipe = tmp_path / "notes.md", tmp_path / "linked", tmp_path / "pipe"
    notes.write_text("mine")
    linked.symlink_to(store)
    os.mkfifo(pipe)
    before = receipt.read_bytes()
    for inside in (receipt, store / "index.sqlite", linked / "run-0" / receipt.name):
        for option in ("--database", "--output"):
            said = run(store, "--cell", CELL, option, inside)
            assert (said.code, f"Next step: give {option}" in said.err) == (WRONG, True)
    for other in (notes, pipe, tmp_path):
        said = run(store, "--database", other)
        assert (said.code, "is no index of this tool" in said.err) == (WRONG, True)
    assert (notes.read_text(), receipt.read_bytes(), pipe.is_fifo()) == ("mine", before, True)
    assert not (store / "index.sqlite").exists()
    find_database(store).parent.mkdir(parents=True)
    find_database(store).write_text("damaged")
    assert run(store).code == OPEN  # nothing but an index is ever there
    assert run(store, "--database", tmp_path / "new.sqlite").code == OPEN
    assert run(store, "--database", tmp_path / "new.sqlite", "--rebuild").code == OPEN


def test_a_disk_that_is_full_is_no_wrong_argument(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(store, "--output", os.devnull).code == OPEN
    assert Path(os.devnull).is_char_device()
    said = run(store, "--output", "/dev/full")
    assert (said.code, "make room" in said.err) == (INFRASTRUCTURE, True)
    monkeypatch.setattr(sys, "stdout", None)
    said = run(store)
    assert (said.code, "standard output is closed" in said.err) == (INFRASTRUCTURE, True)
    assert run(store, "--output", tmp_path / "told").code == OPEN


def test_an_index_that_cannot_be_kept_costs_no_answer(run: Run, store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = run(store, "--cell", CELL, "--database", tmp_path / "file" / "index.sqlite")
    assert said.code == OPEN
    assert "cannot be kept in" in said.flat
