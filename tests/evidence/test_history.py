"""History: rows of a store in order, copies and contradictions, unreadable files by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.errors import Exit, NothingSelected, WrongArguments
from megacpp_validate.evidence.history import HistoryRow, list_rows, read_history
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.store import read_store
from tests.command_line import make_run
from tests.replay.receipts import JIT, good, place, put, red

CELL = "te2.20.2-h200-attention"


def rows(store: Path) -> dict[str, HistoryRow]:
    return {row.run: row for row in list_rows(read_store(store))}


def test_rows_are_oldest_first_and_say_what_their_receipt_says(tmp_path: Path) -> None:
    put(tmp_path, good("attention", hours=1.0), run="b")
    put(tmp_path, red("attention", hours=2.0, jit={**JIT, "after": {"triton": 1}}), run="a")
    put(tmp_path, good("attention", started="no time"), run="c")
    found = list_rows(read_store(tmp_path))
    assert [row.run for row in found] == ["a", "b", "c"]
    row = found[0]
    assert (row.cell, row.outcome, row.seconds["total"], row.peak_memory_mib) == (CELL, Outcome.FAIL, 11.5, 100.0)
    assert (sum(row.after.values()), row.host, row.reason) == (1, "one", "out of bounds")


def test_a_copy_is_no_evidence_and_a_run_that_was_only_timed_counts_for_nothing(tmp_path: Path) -> None:
    for run, changes in (
        ("first", {"hours": 3.0}), ("replayed", {"hours": 3.0}), ("later", {"hours": 2.0}),
        ("again", {"seconds": {"total": 1.0}}),
    ):  # fmt: skip
        put(tmp_path, good("attention", **changes), run=run)
    found = rows(tmp_path)
    assert found["replayed"].same_as == found["first"].path
    assert found["again"].only_timed


FAULTS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "another name": lambda path: path.rename(path.with_name("te2.20.2-h200-permute.json")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_receipt_is_a_row_with_its_reason(name: str, tmp_path: Path) -> None:
    put(tmp_path, good("attention"))
    FAULTS[name](place(tmp_path, "attention"))
    result = read_history(tmp_path)
    ((row,),) = result.cells.values()
    assert (row.outcome, row.run, bool(row.fault)) == (None, "run", True)
    assert (result.receipts, len(result.unreadable), result.exit) == (0, 1, Exit.EVIDENCE_MISSING)


def test_links_pipes_odd_names_and_other_files(tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(tmp_path / "elsewhere", good("attention"))
    for name in (b"a b", b"new\nline", b"\xff\xfe"):
        put(store, good("attention", seed=len(name)), run=os.fsdecode(name))
    (store / "linked").symlink_to(tmp_path / "elsewhere")
    (store / "latest").symlink_to("a b")  # within the store: it hides nothing
    (store / "itself").symlink_to("itself")
    (store / "notes").symlink_to(__file__)
    os.mkfifo(store / f"{CELL}.json")
    (store / ".hidden.json").write_text("{")
    (store / "a-list-of.json").write_text('{"schema_id": "megacpp-validate/upgrade/1"}')
    (store / "files.json").write_text("{}")
    found = read_store(store).files
    assert {one.file: one.hides for one in found if one.head is None} == {
        "itself": False, "linked": True, "latest": False, f"{CELL}.json": False,
    }  # fmt: skip
    assert sum(one.head is not None for one in found) == 3
    for row in list_rows(read_store(store)):
        row.path.encode()  # can be printed


def test_the_verb_and_what_selects_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = make_run(capfd, monkeypatch, "history"), tmp_path / "store"
    put(store, good("attention"), good("permute"))
    assert list(read_history(store, ("*-perm*",)).cells) == ["te2.20.2-h200-permute"]
    for patterns, fault in (((), NothingSelected), (("none",), NothingSelected)):
        with pytest.raises(fault):
            read_history(store, patterns)
    with pytest.raises(WrongArguments):
        read_history(tmp_path / "nowhere")
    said = run(store, "--format", "json")
    assert (said.code, json.loads(said.out)["receipts"]) == (0, 2)
    assert run(store, "--cell", "none").code == 3
