"""The index of an evidence store: thousands of receipts, asked by cell and by run, without reading them again.

The files are the truth. An index is derived from them, can be thrown away at any time, and decides nothing: the gate
reads the receipts. It is one SQLite file, written aside and renamed, so that whoever opens it has a whole one, however
many build it at once. One that is of an older version or of another store is made again, and so is a damaged one at a
place that is for an index alone; elsewhere a file that does not say it is one is left as it is.

A row is read in full only where that was asked for (`validate`): to build every check of ten thousand receipts takes a
minute, and to read the fields of a row two seconds. What was read in which way stands in `HistoryRow.validated`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Final

from .history import HistoryRow, Trend, TrendPoint
from .index_build import Change, bring_up
from .index_schema import RECEIPT, UNREADABLE, IndexNotOurs, IndexUnusable, load_database, save_database
from .receipt import Outcome
from .trend import find_trend

__all__ = [
    "Index", "IndexNotKept", "IndexNotOurs", "IndexSummary", "IndexUnusable", "build_index", "open_index", "read_store",
]  # fmt: skip

_SHOWN: Final = (
    "run", "cell", "stack", "target", "probe", "outcome", "started", "commit", "image_digest", "lock_hash",
    "seconds_total", "seconds_probe", "peak_memory_mib", "compiles_after", "sha256", "path", "step_seconds",
    "environment", "host", "gpu", "schema_id", "reason", "fault", "validated",
    "only_timed",
)  # fmt: skip
_PATH: Final = _SHOWN.index("path")
_CELL: Final = _SHOWN.index("cell")
_COLUMNS: Final = ", ".join(f'"{name}"' for name in _SHOWN)
_UNITS: Final = {
    "seconds_total": "s", "seconds_probe": "s", "step_seconds": "s", "peak_memory_mib": "MiB", "compiles_after": "",
    "tokens_per_second": "tokens/s", "goodput": "",
}  # fmt: skip
# Nothing that lies between two rows may depend on the order in which a file system lists them.
_ORDER: Final = 'ORDER BY kind, at IS NULL, at, run, "key"'


class IndexNotKept(OSError):
    """An index that could not be written; the receipts are untouched, and so is an index that was there."""

    def __init__(self, database: Path, fault: OSError) -> None:
        self.reason = f"{fault.strerror or fault}"
        super().__init__(
            fault.errno,
            f"the index cannot be kept in {database}: {self.reason}. Likely cause: its disk is full, or the place is "
            "not yours. Next step: make room, or give --database another file; the receipts are untouched",
        )

    def __str__(self) -> str:
        return f"{self.strerror}."


@dataclass(frozen=True)
class IndexSummary:
    """What building an index came to.

    Attributes:
        store, database: the folder, and where its index is.
        receipts, unreadable, others: files of each kind that the index has now.
        validated: receipts that were read in full.
        runs, cells: how many.
        read, kept, gone: files that were read now, were as they had been, and are there no more.
        afresh: why every file was read; empty where what was known was of use.
        not_kept: why the index could not be written; empty where it was, or needed not be.
        seconds: that it took.
    """

    store: Path
    database: Path
    receipts: int
    unreadable: int
    others: int
    validated: int
    runs: int
    cells: int
    read: int
    kept: int
    gone: int
    afresh: str
    not_kept: str
    seconds: float


class Index:
    """What is known of a store; it sees one moment, whatever becomes of the files."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def runs(self) -> tuple[str, ...]:
        """Folders that hold receipts, or what should be some; "." is the store itself."""
        return self._names("run")

    def cells(self, patterns: Sequence[str] = ()) -> tuple[str, ...]:
        """Cells of the receipts and, of unreadable ones, of their names.

        Args:
            patterns: names, or such with `*`, `?` and `[...]`; all without one.
        """
        cells = self._names("cell")
        return tuple(cell for cell in cells if not patterns or any(fnmatchcase(cell, one) for one in patterns))

    def history(self, cell: str) -> tuple[HistoryRow, ...]:
        """Every receipt of a cell, oldest first; unreadable ones last."""
        return self._read("cell = ?", cell)

    def run(self, run: str) -> tuple[HistoryRow, ...]:
        """Every receipt of a run, oldest first; unreadable ones last."""
        return self._read("run = ?", run)

    def rows(self) -> tuple[HistoryRow, ...]:
        """Every receipt of the store, oldest first; unreadable ones last."""
        return self._read("1")

    def unreadable(self) -> tuple[HistoryRow, ...]:
        """What should be a receipt and is none, and folders that cannot be looked into, each with why."""
        return self._read("kind = ?", UNREADABLE)

    def quantities(self, cell: str) -> tuple[str, ...]:
        """What was measured of a cell in any run: "seconds_total", "step_seconds", "timing:NAME" in ms, ..."""
        return tuple(sorted({name for _, numbers in self._measured(cell) for name in numbers}))

    def trend(self, cell: str, quantity: str) -> Trend:
        """A quantity of a cell over its runs that passed and say when; empty where none has it."""
        return self.trends(cell, (quantity,))[0]

    def trends(self, cell: str, quantities: Sequence[str] = ()) -> tuple[Trend, ...]:
        """Several at once.

        Args:
            quantities: their names; every one that was measured without them.
        """
        measured = self._measured(cell)
        names = quantities or sorted({name for _, numbers in measured for name in numbers})
        return tuple(find_trend(cell, name, _unit(name), tuple(_points(measured, name))) for name in names)

    def close(self) -> None:
        """Give the memory back."""
        self._connection.close()

    def _names(self, column: str) -> tuple[str, ...]:
        rows = self._connection.execute(
            f'SELECT DISTINCT "{column}" FROM files WHERE kind IN (?, ?) AND "{column}" != ?',  # noqa: S608 - a name of ours
            (RECEIPT, UNREADABLE, ""),
        )
        return tuple(sorted(name for (name,) in rows))

    def _read(self, where: str, *values: str) -> tuple[HistoryRow, ...]:
        found = self._connection.execute(
            f"SELECT {_COLUMNS} FROM files WHERE {where} AND kind IN (?, ?) {_ORDER}",  # noqa: S608 - names of ours
            (*values, RECEIPT, UNREADABLE),
        ).fetchall()
        twins = self._find_twins({row[_CELL] for row in found}) if found else {}
        return tuple(_make_row(row, *twins.get(row[_PATH], ("", ""))) for row in found)

    def _measured(self, cell: str) -> list[tuple[HistoryRow, dict[str, float]]]:
        kept = self._connection.execute("SELECT path, numbers FROM files WHERE cell = ? AND kind = ?", (cell, RECEIPT))
        numbers = dict(kept.fetchall())
        passed = (row for row in self.history(cell) if row.counts and row.dated and row.outcome is Outcome.PASS)
        return [(row, json.loads(numbers[row.path])) for row in passed]

    def _find_twins(self, cells: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Path -> path of the first file with the same bytes, and path of one that tells the same process differently.

        Two receipts are of one process where cell, start, host, environment, commit and the milliseconds that it took
        are the same.
        """
        first: dict[str, str] = {}
        processes: dict[tuple[object, ...], dict[str, str]] = {}
        rows = self._connection.execute(
            'SELECT path, sha256, cell, started, host, environment, "commit", seconds_total FROM files '
            'WHERE kind = ? AND cell IN (SELECT value FROM json_each(?)) ORDER BY at IS NULL, at, run, "key"',
            (RECEIPT, json.dumps(sorted(cells))),
        )
        told = rows.fetchall()
        for path, digest, *process in told:
            first.setdefault(digest, path)
            processes.setdefault(tuple(process), {}).setdefault(digest, path)
        twins = {}
        for path, digest, *process in told:
            others = [other for known, other in processes[tuple(process)].items() if known != digest]
            same = first[digest] if first[digest] != path else ""
            if same or others:
                twins[path] = (same, others[0] if others else "")
        return twins


def build_index(
    store: Path,
    database: Path,
    *,
    rebuild: bool = False,
    replace: bool = False,
    validate: Sequence[str] = (),
    processes: int | None = None,
) -> IndexSummary:
    """Bring the index of a store up to its files, and keep it.

    Args:
        store: a folder tree; any folder below it with receipts is a run.
        database: the file of the index; its folder is made.
        rebuild: read every file, whatever is known.
        replace: whatever lies at `database` was an index, as at a place that is for one alone; otherwise a file there
            has to say that it is one.
        validate: patterns of cells whose receipts are read in full.
        processes: that read at the same time; None for what pays.

    Raises:
        IndexNotKept: it cannot be written.
        IndexNotOurs: the file of the index is another one, and is left alone.
        OSError: the store is no folder, or cannot be looked into.
    """
    make = partial(bring_up, rebuild=rebuild, replace=replace, validate=validate, processes=processes)
    index, summary = _bring_up(store, database, make, keep=True)
    index.close()
    return summary


def open_index(database: Path) -> Index:
    """An index as it was built last; files that came since are not in it.

    Raises:
        IndexUnusable: it is damaged, or of another version.
        OSError: it cannot be read.
    """
    return Index(load_database(database))


def read_store(
    store: Path,
    database: Path,
    *,
    rebuild: bool = False,
    replace: bool = False,
    validate: Sequence[str] = (),
    processes: int | None = None,
) -> tuple[Index, IndexSummary]:
    """As `build_index`, and the index itself; where it cannot be kept, the summary says so.

    Raises:
        IndexNotOurs: the file of the index is another one, and is left alone.
        OSError: the store is no folder, or cannot be looked into.
    """
    make = partial(bring_up, rebuild=rebuild, replace=replace, validate=validate, processes=processes)
    return _bring_up(store, database, make, keep=False)


def _bring_up(
    store: Path, database: Path, make: Callable[[Path, Path], Change], *, keep: bool
) -> tuple[Index, IndexSummary]:
    started = time.monotonic()
    change = make(store, database)
    not_kept = ""
    if change.read or change.gone or change.afresh:
        try:
            save_database(change.connection, database)
        except OSError as fault:
            refused = IndexNotKept(database, fault)
            if keep:
                raise refused from fault
            not_kept = str(refused)
    summary = _summarize(store, database, change, not_kept, time.monotonic() - started)
    return Index(change.connection), summary


def _summarize(store: Path, database: Path, change: Change, not_kept: str, seconds: float) -> IndexSummary:
    ask = change.connection.execute
    kinds = dict(ask("SELECT kind, count(*) FROM files GROUP BY kind").fetchall())
    ((validated,),) = ask("SELECT count(*) FROM files WHERE validated").fetchall()
    receipts, unreadable = kinds.pop(RECEIPT, 0), kinds.pop(UNREADABLE, 0)
    index = Index(change.connection)
    return IndexSummary(
        store=store,
        database=database,
        receipts=receipts,
        unreadable=unreadable,
        others=sum(kinds.values()),
        validated=validated,
        runs=len(index.runs()),
        cells=len(index.cells()),
        read=change.read,
        kept=change.kept,
        gone=change.gone,
        afresh=change.afresh,
        not_kept=not_kept,
        seconds=seconds,
    )


def _make_row(values: Sequence[object], same_as: str, contradicts: str) -> HistoryRow:
    named = dict(zip(_SHOWN, values, strict=True))
    named["outcome"] = Outcome(str(named["outcome"])) if named["outcome"] else None
    named |= {name: bool(named[name]) for name in ("validated", "only_timed")}
    return HistoryRow(**named, same_as=same_as, contradicts=contradicts)  # type: ignore[arg-type]  # columns of ours


def _points(measured: Iterable[tuple[HistoryRow, dict[str, float]]], name: str) -> Iterable[TrendPoint]:
    for row, numbers in measured:
        if name in numbers:
            yield TrendPoint(run=row.run, started=row.started, commit=row.commit, value=numbers[name])


def _unit(quantity: str) -> str:
    return _UNITS.get(quantity, "ms")
