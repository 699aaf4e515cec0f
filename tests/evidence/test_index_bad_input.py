"""What lies in a store and is no evidence: damaged, edited, copied, linked, and files with odd names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.evidence.index import build_index, open_index
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.receipt_file import receipt_text
from tests.stored_receipts import make_receipt, put

CELL = "te2.20.2-h200-attention"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "index.sqlite"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def edited(path: Path) -> None:
    path.write_text(path.read_text().replace('"outcome": "pass"', '"outcome": "fail"'))


def good_over_bad(path: Path) -> None:
    path.write_text(path.read_text().replace('"passed": true', '"passed": false', 1))


def with_nan(path: Path) -> None:
    path.write_text(path.read_text().replace('"peak_memory_mib": 512.5', '"peak_memory_mib": NaN'))


def less_than_nothing(path: Path) -> None:
    path.write_text(path.read_text().replace('"triton": 1\n', '"triton": -1\n'))


def twice(path: Path) -> None:
    path.write_text(path.read_text().replace('"stack"', '"outcome": "fail",\n  "stack"', 1))


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def linked(path: Path) -> None:
    path.rename(path.parent.parent.parent / path.name)
    path.symlink_to(path.parent.parent.parent / path.name)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, "EOF"),
    "empty": (lambda path: path.write_bytes(b""), "EOF"),
    "no-text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "the file"),
    "edited": (edited, "outcome fail without a failed check"),
    "good-over-bad": (good_over_bad, "with the failed check bf16.out"),
    "nan": (with_nan, "NaN"),
    "a-key-twice": (twice, "the key 'outcome' is there twice"),
    "deep": (lambda path: path.write_bytes(b'{"cell":' + b"[" * 100_000), "recursion"),
    "renamed": (lambda path: path.rename(path.with_name("te2.20.2-h200-permute.json")), "its name does not say"),
    "huge": (lambda path: os.truncate(path, 65 << 20), "more than any receipt"),
    "pipe": (piped, "no regular file"),
    "link": (linked, "no part of the store"),
    "nothing-compiled-less": (less_than_nothing, "jit.after counts -1 of triton"),
}


@pytest.mark.parametrize(("fault", "word"), FAULTS.values(), ids=FAULTS)
def test_what_is_no_receipt_is_a_row_with_its_reason(
    fault: Callable[[Path], object], word: str, tmp_path: Path, database: Path
) -> None:
    path = put(tmp_path / "store", "run")
    assert build_index(tmp_path / "store", database).unreadable == 0
    fault(path)
    summary = build_index(tmp_path / "store", database)
    assert (summary.receipts, summary.unreadable) == (0, 1)
    (row,) = open_index(database).unreadable()
    assert (row.outcome, row.run) == (None, "run")
    assert row.cell in (CELL, "te2.20.2-h200-permute")
    assert word in row.fault
    assert open_index(database).history(row.cell) == (row,)


def test_the_numbers_within_checks_are_seen_in_full_alone(tmp_path: Path, database: Path) -> None:
    """What the quick way does not see is said: the row is not validated, and the cell that is asked for is."""
    path = put(tmp_path / "store", "run")
    path.write_text(path.read_text().replace('"observed": 0.001', '"observed": 0.5'))
    build_index(tmp_path / "store", database)
    (row,) = open_index(database).rows()
    assert (row.outcome, row.validated) == (Outcome.PASS, False)
    build_index(tmp_path / "store", database, validate=[CELL])
    (row,) = open_index(database).rows()
    assert row.outcome is None
    assert "0.5 is beyond its bound" in row.fault


def test_a_copy_is_no_evidence_and_an_edited_copy_counts_for_nothing(tmp_path: Path, database: Path) -> None:
    store = tmp_path / "store"
    put(store, "first")
    put(store, "replayed")
    put(store, "edited", commit="c" * 40, peak_memory_mib=1.0)
    put(store, "later", started="2026-11-23T00:00:00+00:00")
    build_index(store, database)
    by_run = {row.run: row for row in open_index(database).history(CELL)}
    assert {run: row.counts for run, row in by_run.items()} == {
        "edited": False, "first": False, "replayed": False, "later": True,
    }  # fmt: skip
    assert by_run["replayed"].same_as == by_run["first"].path
    assert by_run["first"].contradicts == by_run["edited"].path
    assert by_run["edited"].contradicts == by_run["first"].path
    assert [point.run for point in open_index(database).trend(CELL, "peak_memory_mib").points] == ["later"]


def test_a_link_to_a_folder_is_told(tmp_path: Path, database: Path) -> None:
    """What lies behind it is not in the index, and whoever put it there should know."""
    put(tmp_path / "elsewhere", "run")
    put(tmp_path / "store", "run")
    (tmp_path / "store" / "linked").symlink_to(tmp_path / "elsewhere")
    summary = build_index(tmp_path / "store", database)
    assert (summary.receipts, summary.unreadable, summary.cells) == (1, 1, 1)
    (row,) = open_index(database).unreadable()
    assert (row.path, row.cell, "no part of the store" in row.fault) == ("linked", "", True)


@pytest.mark.parametrize("target", ["not-mounted", "itself", "x" * 300, os.devnull])
def test_a_link_to_no_file_is_told(target: str, tmp_path: Path, database: Path) -> None:
    """What a link that leads nowhere today hides tomorrow nobody knows, and it costs nobody the rest."""
    put(tmp_path / "store", "run")
    (tmp_path / "store" / "itself").symlink_to(target)
    (tmp_path / "store" / "notes").symlink_to(__file__)
    summary = build_index(tmp_path / "store", database)
    assert (summary.receipts, summary.unreadable) == (1, 1)
    (row,) = open_index(database).unreadable()
    assert (row.path, "no part of the store" in row.fault) == ("itself", True)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"schema_id": null}'])
def test_a_receipt_that_something_overwrote_is_unreadable_and_not_another_file(
    text: str, tmp_path: Path, database: Path
) -> None:
    path = put(tmp_path / "store", "run")
    path.write_text(text)
    path.with_name("files.json").write_text(text)
    path.with_name("a-list-of.json").write_text('{"schema_id": "megacpp-validate/upgrade/1"}')
    summary = build_index(tmp_path / "store", database)
    assert (summary.unreadable, summary.others) == (1, 2)
    assert [row.cell for row in open_index(database).unreadable()] == [CELL]


NAMES = [b"a b", b"<script>alert(1)</script>", b"new\nline", b"\xff\xfe", "\u202egnp".encode(), b"%2e%2e", b"'; DROP--"]


def test_odd_names_are_kept_apart_and_shown_as_text(tmp_path: Path, database: Path) -> None:
    store = tmp_path / "store"
    text = receipt_text(make_receipt()).encode()
    for number, name in enumerate(NAMES):
        run = store / os.fsdecode(name)
        run.mkdir(parents=True)
        (run / f"{CELL}.json").write_bytes(text.replace(b'"seed": 0', b'"seed": %d' % number))
    (store / os.fsdecode(b"\xff.json")).write_text("{")
    summary = build_index(store, database)
    assert (summary.receipts, summary.unreadable, summary.runs) == (len(NAMES), 1, len(NAMES) + 1)
    runs = open_index(database).runs()
    assert r"\xff\xfe" in runs
    for text_of in (*runs, *(row.path for row in open_index(database).rows())):
        text_of.encode()  # can be printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "store"]


FULL = "mount -t tmpfs -o size=16k tmpfs {place} && exec {words}"


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """The history is told all the same, and nothing half written lies on the disk."""
    put(tmp_path / "store", "run")
    place = tmp_path / "disk"
    place.mkdir()
    code = "import megacpp_validate.cli.gate.history_verbs; from megacpp_validate.cli import main; main()"
    words = f"sh -c '{sys.executable} -c \"{code}\" history {tmp_path}/store --cell {CELL}; echo code $?; find {place}'"
    command = ["unshare", "--mount", "sh", "-c", FULL.format(place=place, words=words)]
    variables = {**os.environ, "MEGACPP_CACHE_DIR": str(place / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if "code" not in done.stdout:
        pytest.skip(f"not-run: this user cannot mount a disk of their own: {done.stderr[-200:]}")
    said, _, rest = done.stdout.partition("code ")
    assert "No space left on device" in " ".join(said.split())
    assert "1 receipt on 2026-11-21: 1 pass." in said
    code_told, *left = rest.split()
    assert (code_told, [path for path in left if "sqlite" in path]) == ("0", [])
