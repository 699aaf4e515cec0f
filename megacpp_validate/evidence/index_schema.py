"""The database of an index: its one table, and how a file is taken for one or refused.

The files of the store are the truth. A database is derived, so that one that is damaged, of another version, or of
another store is made again, and never mended or believed; a file that may be no database of ours is not overwritten.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from .whole_file import write_whole_bytes

VERSION: Final = 3  # of the table and of what is read out of a receipt: with another one, everything is read again
TOOL: Final = "megacpp-validate"
_MAGIC: Final = b"SQLite format 3\0"
RECEIPT, UNREADABLE, OTHER = "receipt", "unreadable", "other"


class IndexUnusable(ValueError):
    """A database that is none of this tool, of this version, or of this store."""

    def __init__(self, database: Path, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{database} is no usable index: {reason}. Likely cause: it was cut short or overwritten, or "
            "comes from another version. Next step: build it again; it is derived from the receipts: nothing is lost."
        )


class IndexNotOurs(OSError):
    """A file where an index is to lie, and that does not say it is one: it may be a receipt, or anybody's."""

    def __init__(self, database: Path, reason: str) -> None:
        super().__init__(
            f"{database} is there already, and is no index of this tool: {reason}. Likely cause: it is another file, "
            "or a damaged index. Next step: name another file, or remove this one if it was an index; it is as it was"
        )


@dataclass(frozen=True, slots=True)
class FileRow:
    """One `*.json` file of a store, as the table has it; the columns are those of `HistoryRow` and how it was read.

    Attributes:
        key: its path below the store, as the file system's bytes.
        stamp: size, times and inode when it was read; empty where it may have changed in that moment.
        kind: `RECEIPT`, `UNREADABLE`, or `OTHER`: whole JSON that does not claim to be a receipt.
        at: seconds since 1970 at which it started; None where that cannot be told, as of a time without a zone.
        outcome: empty where it is unreadable.
        numbers: JSON, quantity -> value.
    """

    key: bytes
    stamp: str
    kind: str
    sha256: str = ""
    path: str = ""
    run: str = ""
    cell: str = ""
    stack: str = ""
    target: str = ""
    probe: str = ""
    outcome: str = ""
    started: str = ""
    at: float | None = None
    commit: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    environment: str = ""
    host: str = ""
    gpu: str = ""
    schema_id: str = ""
    reason: str = ""
    fault: str = ""
    validated: int = 0
    only_timed: int = 0
    seconds_total: float | None = None
    seconds_probe: float | None = None
    peak_memory_mib: float = 0.0
    compiles_after: int = 0
    step_seconds: float | None = None
    numbers: str = "{}"


COLUMNS: Final = tuple(field.name for field in fields(FileRow))
_QUOTED: Final = ", ".join(f'"{name}"' for name in COLUMNS)
INSERT: Final = f"INSERT OR REPLACE INTO files ({_QUOTED}) VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
SELECT: Final = f"SELECT {_QUOTED} FROM files"  # noqa: S608 - of the names above alone
_SCHEMA: Final = f"""
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE files ({_QUOTED}, PRIMARY KEY ("key"));
CREATE INDEX by_cell ON files (cell, at);
CREATE INDEX by_run ON files (run);
"""


def make_database(store: Path) -> sqlite3.Connection:
    """An empty one in memory."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(_SCHEMA)
    connection.executemany("INSERT INTO about VALUES (?, ?)", _describe(store).items())
    connection.execute(f"PRAGMA user_version = {VERSION}")
    return connection


def refuse_others(database: Path) -> None:
    """Raise where the file that an index would overwrite does not say that it is one of this tool, of any version.

    Raises:
        IndexNotOurs: it does not, or cannot be asked.
    """
    try:
        content = _read_regular(database)
        if not content:
            return
        connection = sqlite3.connect(":memory:")
        try:
            connection.deserialize(content)
            tool = about(connection).get("tool")
        finally:
            connection.close()
    except FileNotFoundError:
        return
    except (OSError, sqlite3.Error, UnicodeDecodeError, OverflowError) as fault:
        if not os.path.lexists(database):  # what cannot be reached is not overwritten either
            return
        raise IndexNotOurs(database, getattr(fault, "strerror", None) or str(fault)) from fault
    if tool != TOOL:
        raise IndexNotOurs(database, f"it is of {tool!r}")


def _read_regular(database: Path) -> bytes:
    """A file's bytes; to open a pipe would wait for who writes to it, and a device may never end.

    Raises:
        OSError: it cannot be read, or is none.
    """
    if not stat.S_ISREG(database.stat().st_mode):
        raise OSError(0, "it is no regular file")
    return database.read_bytes()


def load_database(database: Path, store: Path | None = None) -> sqlite3.Connection:
    """A copy of a database in memory, once it has been looked at: a few MB for thousands of receipts.

    Args:
        store: that it must be of; any without it.

    Raises:
        IndexUnusable: it is damaged, or of another version or store.
        OSError: it cannot be read.
    """
    content = _read_regular(database)
    if not content.startswith(_MAGIC):
        raise IndexUnusable(database, "it is no SQLite database")
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(content)
        _look_at(connection, database, store)
    except (sqlite3.Error, IndexUnusable, UnicodeDecodeError, OverflowError) as fault:
        connection.close()
        raise fault if isinstance(fault, IndexUnusable) else IndexUnusable(database, str(fault)) from fault
    return connection


def save_database(connection: sqlite3.Connection, database: Path) -> None:
    """Write a database aside and rename it: whoever opens it has the whole one before or the whole one after.

    Raises:
        OSError: the place cannot be written, or is full; what was there stays.
    """
    write_whole_bytes(database, connection.serialize())


def about(connection: sqlite3.Connection) -> dict[str, str]:
    """What a database says of itself."""
    return dict(connection.execute("SELECT name, value FROM about").fetchall())


def _describe(store: Path) -> dict[str, str]:
    return {"tool": TOOL, "store": ascii(str(store.resolve())), "columns": ",".join(COLUMNS)}


def _look_at(connection: sqlite3.Connection, database: Path, store: Path | None) -> None:
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    if version != VERSION:
        raise IndexUnusable(database, f"its version is {version}, and this tool writes {VERSION}")
    said = {}
    with suppress(sqlite3.OperationalError):  # no such table
        said = about(connection)
    for name, value in _describe(store or Path()).items():
        if said.get(name) != value and not (name == "store" and store is None):
            raise IndexUnusable(database, f"its {name} is {said.get(name)!r} instead of {value!r}")
    ((state,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
    if state != "ok":
        raise IndexUnusable(database, str(state))
