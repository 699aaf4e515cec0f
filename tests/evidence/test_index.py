"""The index of a store: what it holds is what the files say, however it came about; what is unreadable is a row."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.evidence import index_files
from megacpp_validate.evidence.history import HistoryRow
from megacpp_validate.evidence.index import (
    IndexNotKept,
    IndexNotOurs,
    IndexUnusable,
    build_index,
    open_index,
    read_store,
)
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.receipt_fields import read_fields, validate_fields
from megacpp_validate.evidence.receipt_file import receipt_text
from megacpp_validate.evidence.store import ReceiptInvalid
from tests.stored_receipts import age, make_receipt, put

ROOT = Path(__file__).parents[2]
CELL = "te2.20.2-h200-attention"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two runs of a cell, a cell of another stack, and the result of a verb."""
    folder = tmp_path / "store"
    put(folder, "b", started="2026-11-22T08:00:00+02:00", seconds={"probe": 2.0, "total": 9.0})  # 06:00 in UTC
    put(folder, "a/deep", make_receipt(Outcome.FAIL), started="2026-11-22T07:00:00+00:00")
    put(folder, "a", make_receipt(stack="te2.17.1"))
    (folder / "a" / "result.json").write_text('{"schema_id": "megacpp-validate/parity/1"}')
    return folder


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are young; that one which is read too early is read again has a test of its own."""
    monkeypatch.setattr(index_files, "_YOUNG", -60.0)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "index.sqlite"


def rows_of(database: Path) -> tuple[HistoryRow, ...]:
    return open_index(database).rows()


def test_a_row_is_what_its_receipt_says(store: Path, database: Path) -> None:
    summary = build_index(store, database)
    assert (summary.receipts, summary.unreadable, summary.others, summary.runs, summary.cells) == (3, 0, 1, 3, 2)
    assert (summary.read, summary.kept, summary.gone, summary.afresh) == (4, 0, 0, "there was no index")
    index = open_index(database)
    assert index.runs() == ("a", "a/deep", "b")
    assert index.cells() == ("te2.17.1-h200-attention", CELL)
    assert index.cells(("te2.17*",)) == ("te2.17.1-h200-attention",)
    first, second = index.history(CELL)  # by time, in whatever zone it is told
    assert (first.run, first.outcome, first.seconds_total, first.seconds_probe) == ("b", Outcome.PASS, 9.0, 2.0)
    assert (second.run, second.outcome, second.reason) == ("a/deep", Outcome.FAIL, "it ended with fail")
    assert (second.seconds_total, second.seconds_probe, second.peak_memory_mib) == (10.25, 2.5, 512.5)
    assert (second.stack, second.target, second.probe, second.compiles_after) == ("te2.20.2", "h200", "attention", 1)
    assert (second.commit, second.lock_hash, second.environment) == ("c" * 40, "e" * 64, "a" * 64)
    assert (second.image_digest, second.gpu, second.host) == ("sha256:" + "d" * 64, "NVIDIA H200", "node-1")
    assert second.path == f"a/deep/{CELL}.json"
    assert index.run("b") == (first,)
    trend = index.trend(CELL, "timing:forward")
    assert [(point.run, point.value) for point in trend.points] == [("b", 1.25)]  # the other one failed
    assert index.trend(CELL, "step_seconds").points == ()
    assert "timing:forward" in index.quantities(CELL)


def test_what_was_only_timed_or_does_not_say_when_is_in_no_trend(tmp_path: Path, database: Path) -> None:
    store = tmp_path / "store"
    put(store, "judged", started="2026-11-20T08:00:00+00:00")
    put(store, "again", started="2026-11-21T08:00:00+00:00", seconds={"speed": 1.0, "total": 9.0})
    put(store, "early", make_receipt(Outcome.ERROR), started="2026-11-22T08:00:00+00:00", seconds={"total": 1.0})
    put(store, "naive", started="2026-11-22T09:00:00", peak_memory_mib=1.0)
    put(store, "undated", started="", peak_memory_mib=2.0)
    build_index(store, database)
    rows = {row.run: row for row in open_index(database).history(CELL)}
    assert list(rows) == ["judged", "again", "early", "naive", "undated"]
    assert {run: (row.only_timed, row.counts, row.dated) for run, row in rows.items()} == {
        "judged": (False, True, True), "again": (True, False, True), "early": (False, True, True),
        "naive": (False, True, False), "undated": (False, True, False),
    }  # fmt: skip
    for trend in open_index(database).trends(CELL):
        assert [point.run for point in trend.points] == ["judged"]


def test_only_what_changed_is_read_again(store: Path, database: Path) -> None:
    build_index(store, database)
    before = database.stat().st_ino
    again = build_index(store, database)
    assert (again.read, again.kept, again.gone, again.afresh) == (0, 4, 0, "")
    assert database.stat().st_ino == before  # nothing was written
    put(store, "b", make_receipt(Outcome.ERROR))
    put(store, "c")
    (store / "a" / "te2.17.1-h200-attention.json").unlink()
    changed = build_index(store, database)
    assert (changed.read, changed.kept, changed.gone, changed.receipts) == (2, 2, 1, 3)
    assert [row.run for row in rows_of(database)] == ["b", "c", "a/deep"]
    incremental = rows_of(database)
    assert build_index(store, database, rebuild=True).read == 4
    assert rows_of(database) == incremental


def test_the_same_size_and_time_do_not_hide_another_content(store: Path, database: Path) -> None:
    build_index(store, database)
    path = store / "b" / f"{CELL}.json"
    state = path.stat()
    path.write_bytes(path.read_bytes().replace(b"9.0", b"8.0"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    assert build_index(store, database).read == 1
    assert open_index(database).history(CELL)[0].seconds_total == 8.0


def test_what_was_written_a_moment_ago_is_read_again(
    store: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_files, "_YOUNG", 2.0)
    build_index(store, database)
    assert build_index(store, database).read == 4


def test_cells_that_are_named_are_read_in_full_once(store: Path, database: Path) -> None:
    assert build_index(store, database).validated == 0
    named = build_index(store, database, validate=["te2.20.2-*"])
    assert (named.read, named.validated) == (2, 2)
    assert build_index(store, database, validate=["te2.20.2-*"]).read == 0
    assert {row.run: row.validated for row in rows_of(database)} == {"a": False, "a/deep": True, "b": True}


def test_other_processes_find_the_same(store: Path, tmp_path: Path) -> None:
    for number in range(9):  # three chunks and more
        put(store, f"many/{number}", seed=number)
    code = (
        "import sys; from pathlib import Path; from megacpp_validate.evidence.index import build_index as b;"
        "b(Path(sys.argv[1]), Path(sys.argv[2]), validate=['*'], processes=2)"
    )
    subprocess.run([sys.executable, "-c", code, store, tmp_path / "two"], check=True)
    build_index(store, tmp_path / "one", validate=["*"], processes=1)
    assert rows_of(tmp_path / "two") == rows_of(tmp_path / "one")
    assert len(rows_of(tmp_path / "two")) == 12


def test_hidden_files_are_still_being_written(store: Path, database: Path) -> None:
    (store / "a" / f".{CELL}.json").write_text("{")
    (store / ".git").mkdir()
    (store / ".git" / "x.json").write_text("{")
    assert build_index(store, database).unreadable == 0


def test_a_folder_that_cannot_be_looked_into_is_told(
    store: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a scandir that refuses it: root may look into every folder."""
    real = os.scandir

    def refuse(folder: bytes) -> object:
        if folder.endswith(b"/deep"):
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(index_files.os, "scandir", refuse)
    build_index(store, database)
    (row,) = open_index(database).unreadable()
    assert (row.path, row.cell) == ("a/deep", "")
    assert "Permission denied" in row.fault
    assert open_index(database).cells() == ("te2.17.1-h200-attention", CELL)


def garbage(database: Path) -> None:
    database.write_bytes(b"no database")


def cut(database: Path) -> None:
    database.write_bytes(database.read_bytes()[: database.stat().st_size // 2])


def flipped(database: Path) -> None:
    content = bytearray(database.read_bytes())
    content[4096:8192] = bytes(4096)
    database.write_bytes(content)


def older(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA user_version = 0")
    connection.close()


def piped(database: Path) -> None:
    database.unlink()
    os.mkfifo(database)


def another_table(database: Path) -> None:
    database.unlink()
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA user_version = 1")
        connection.execute("CREATE TABLE files (x)")
    connection.close()


@pytest.mark.parametrize("damage", [garbage, cut, flipped, older, another_table, lambda path: path.write_bytes(b"")])
def test_a_database_that_cannot_be_believed_is_made_again(
    damage: Callable[[Path], object], store: Path, database: Path
) -> None:
    build_index(store, database)
    rows = rows_of(database)
    damage(database)
    with pytest.raises(IndexUnusable, match="Next step: build it again"):
        open_index(database)
    summary = build_index(store, database, replace=True)
    assert summary.afresh
    assert (summary.read, rows_of(database)) == (4, rows)


def no_permission(database: Path) -> None:
    garbage(database)
    database.chmod(0)  # which root does not mind


def told_of(database: Path) -> tuple[int, ...]:
    state = database.lstat()
    return state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns


@pytest.mark.parametrize("damage", [garbage, cut, another_table, no_permission, piped])
@pytest.mark.parametrize("rebuild", [False, True])
def test_a_file_that_does_not_say_it_is_an_index_is_never_overwritten(
    damage: Callable[[Path], object], rebuild: bool, store: Path, database: Path
) -> None:
    build_index(store, database)
    damage(database)
    before = told_of(database)
    for make in (build_index, read_store):
        with pytest.raises(IndexNotOurs, match="is there already"):
            make(store, database, rebuild=rebuild)
    assert told_of(database) == before


def test_an_index_of_an_older_version_is_ours(store: Path, database: Path) -> None:
    build_index(store, database)
    older(database)
    assert build_index(store, database).read == 4


def test_the_database_of_another_store_is_not_believed(store: Path, database: Path, tmp_path: Path) -> None:
    build_index(store, database)
    put(tmp_path / "other", "run")
    summary = build_index(tmp_path / "other", database)
    assert (summary.receipts, summary.read) == (1, 1)
    assert "store" in summary.afresh


def test_a_full_disk_costs_neither_the_answer_nor_the_index_before(store: Path, database: Path) -> None:
    """Files may grow to 100 bytes, which the kernel holds to as it does to the end of a disk."""
    build_index(store, database)
    before = database.read_bytes()
    put(store, "c")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(IndexNotKept, match="Next step: make room"):
            build_index(store, database)
        index, summary = read_store(store, database)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert (len(index.history(CELL)), summary.receipts) == (3, 4)
    assert "File too large" in summary.not_kept
    assert database.read_bytes() == before
    assert os.listdir(database.parent) == [database.name]  # noqa: PTH208 - hidden files too


def test_readers_always_see_a_whole_index(store: Path, database: Path) -> None:
    """Two builders that never stop, and a reader beside them."""
    build_index(store, database)
    code = (
        "import sys; from pathlib import Path; from megacpp_validate.evidence.index import build_index as b\n"
        "while True: b(Path(sys.argv[1]), Path(sys.argv[2]), rebuild=True)"
    )
    builders = [subprocess.Popen([sys.executable, "-c", code, store, database]) for _ in range(2)]
    try:
        seen = set()
        while len(seen) < 5:
            state = database.stat()
            seen.add((state.st_ino, state.st_mtime_ns))
            assert len(rows_of(database)) == 3
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()


texts = st.text(max_size=12)
edits = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["cut", "drop", '"', "NaN", "{", "0"])))


@settings(max_examples=40)
@given(reason=texts, environment=texts, seconds=st.dictionaries(texts, st.floats(0, 1e6), max_size=2), edits=edits)
def test_the_quick_way_says_what_the_long_way_says(
    reason: str, environment: str, seconds: dict[str, float], edits: list[tuple[float, str]]
) -> None:
    """Of whatever is in a receipt; and of a damaged one either finds the same fields, or none where all were read.

    A damage within the checks is the one thing that only the long way sees.
    """
    receipt = make_receipt(reason=reason, environment=environment, seconds=seconds)
    text = receipt_text(receipt)
    for place, what in edits[:2]:
        at = int(len(text) * place)
        text = text[:at] if what == "cut" else text[:at] + ("" if what == "drop" else what) + text[at + 1 :]
    path = Path(f"{CELL}.json")
    try:
        full = validate_fields(text.encode(), path)
    except ReceiptInvalid:
        try:
            quick = read_fields(text.encode(), path)
        except ReceiptInvalid:
            return
        assert not quick.validated
        return
    quick = read_fields(text.encode(), path)
    assert (quick.texts, quick.outcome, quick.seconds, quick.numbers) == (
        full.texts, full.outcome, full.seconds, full.numbers,
    )  # fmt: skip


DEEDS = ("put", "fail", "cut", "drop", "copy", "ask")


@settings(max_examples=12)
@given(deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 3)), min_size=1, max_size=8))
def test_however_a_store_came_about_its_index_is_that_of_its_files(
    deeds: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("any")
    store, database = place / "store", place / "index"
    store.mkdir()
    for deed, number in deeds:
        path = store / f"run-{number}" / f"{CELL}.json"
        if deed in ("put", "fail"):
            put(store, f"run-{number}", make_receipt(Outcome.FAIL if deed == "fail" else Outcome.PASS), seed=number)
        elif deed == "cut" and path.is_file():
            path.write_bytes(path.read_bytes()[:-9])
        elif deed == "drop":
            path.unlink(missing_ok=True)
        elif deed == "copy" and path.is_file():
            shutil.copytree(path.parent, store / "copies" / str(number), dirs_exist_ok=True)
        build_index(store, database, validate=[CELL] if deed == "ask" else [])
    build_index(store, database, validate=["*"])
    build_index(store, place / "afresh", validate=["*"])
    assert rows_of(database) == rows_of(place / "afresh")
    assert len(rows_of(database)) == len(list(store.rglob("*.json")))


def test_a_receipt_in_another_layout_is_read_in_full(tmp_path: Path, database: Path) -> None:
    path = put(tmp_path / "store", "run")
    path.write_text(json.dumps(json.loads(path.read_text())))
    age(path)
    build_index(tmp_path / "store", database)
    (row,) = rows_of(database)
    assert (row.outcome, row.validated) == (Outcome.PASS, True)


def test_the_committed_evidence_is_indexed_whole(database: Path) -> None:
    summary = build_index(ROOT / "docs" / "evidence", database)
    assert summary.receipts > 70
    assert summary.unreadable == 0
    assert {row.outcome for row in rows_of(database)} >= {Outcome.PASS, Outcome.BLOCKED, Outcome.IMPORT_ERROR}
