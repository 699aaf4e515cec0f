"""An index brought up to its store: what is new or changed is read, what is gone is dropped, the rest is left alone."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from .index_files import Found, find_files, read_file
from .index_schema import COLUMNS, INSERT, RECEIPT, IndexUnusable, load_database, make_database, refuse_others

_CHUNK: Final = {False: 64, True: 4}  # files that a process takes at a time; more, and one waits for the last
# Files below which starting a process takes longer than it saves; to read one in full takes twenty times as long.
_WORTH_A_PROCESS: Final = {False: 512, True: 32}
_TO_TUPLE: Final = attrgetter(*COLUMNS)


class _Known(NamedTuple):
    stamp: str
    kind: str
    validated: int

    def answers(self, file: Found, *, in_full: bool) -> bool:
        """Whether the file is as it was, and was read as far as is wanted."""
        return (
            bool(file.stamp)
            and self.stamp == file.stamp
            and (bool(self.validated) or not in_full or self.kind != RECEIPT)
        )


class Change(NamedTuple):
    """What bringing an index up to its store came to.

    Attributes:
        connection: the database, in memory.
        read, kept, gone: files.
        afresh: why everything was read; empty where what was known was of use.
    """

    connection: sqlite3.Connection
    read: int
    kept: int
    gone: int
    afresh: str


def bring_up(
    store: Path, database: Path, *, rebuild: bool, replace: bool, validate: Sequence[str], processes: int | None
) -> Change:
    """The index of a store in memory; nothing is written.

    Args:
        database: what is known from before, where it can be used.
        rebuild: read every file, whatever is known.
        replace: the place is for an index alone, and whatever lies there was one.
        validate: patterns of cells whose receipts are read in full.
        processes: that read at the same time; None for what pays.

    Raises:
        IndexNotOurs: the file of the index is another one.
        OSError: the store cannot be looked into.
    """
    connection, afresh = _load(store, database, rebuild=rebuild)
    if afresh and not replace:
        refuse_others(database)
    rows = connection.execute('SELECT "key", stamp, kind, validated FROM files')
    known = {key: _Known(stamp, kind, validated) for key, stamp, kind, validated in rows}
    quick: list[Found] = []
    full: list[Found] = []
    found: set[bytes] = set()
    for file in find_files(store):
        found.add(file.key)
        in_full = any(fnmatchcase(_cell_of(file.key), pattern) for pattern in validate)
        before = known.get(file.key)
        if before is None or not before.answers(file, in_full=in_full):
            (full if in_full else quick).append(file)
    gone = [(key,) for key in known.keys() - found]
    with connection:
        connection.executemany('DELETE FROM files WHERE "key" = ?', gone)
        for files, validated in ((quick, False), (full, True)):
            _read_into(connection, os.fsencode(store), files, validated, processes)
    read = len(quick) + len(full)
    return Change(connection, read, len(found) - read, len(gone), afresh)


def _load(store: Path, database: Path, *, rebuild: bool) -> tuple[sqlite3.Connection, str]:
    if rebuild:
        return make_database(store), "it was asked for"
    try:
        return load_database(database, store), ""
    except FileNotFoundError:
        return make_database(store), "there was no index"
    except OSError as fault:
        return make_database(store), f"the index cannot be read: {fault.strerror or fault}"
    except IndexUnusable as fault:
        return make_database(store), fault.reason


def _cell_of(key: bytes) -> str:
    return key.rpartition(b"/")[2].decode("utf-8", "backslashreplace").removesuffix(".json")


def _read_into(
    connection: sqlite3.Connection, store: bytes, files: Sequence[Found], validate: bool, processes: int | None
) -> None:
    """Read files into the table. This process takes chunks from the front, the others from the end, until they meet."""
    size = _CHUNK[validate]
    chunks = [files[start : start + size] for start in range(0, len(files), size)]
    others = _count_others(len(files), validate, processes)
    if not others:
        for chunk in chunks:
            connection.executemany(INSERT, _read_chunk(store, chunk, validate))
        return
    with ProcessPoolExecutor(others, multiprocessing.get_context("fork")) as pool:
        theirs = [pool.submit(_read_chunk, store, chunk, validate) for chunk in reversed(chunks)][::-1]
        for chunk, future in zip(chunks, theirs, strict=True):
            try:
                rows = _read_chunk(store, chunk, validate) if future.cancel() else future.result()
            except BrokenProcessPool:  # killed for its memory, say: the files are there still
                rows = _read_chunk(store, chunk, validate)
            connection.executemany(INSERT, rows)


def _count_others(files: int, validate: bool, processes: int | None) -> int:
    """How many processes beside this one. To fork one that has threads may hang the child: then there is none."""
    if processes is not None:
        return processes - 1
    if sys.platform != "linux" or threading.active_count() > 1 or files < _WORTH_A_PROCESS[validate]:
        return 0
    return len(os.sched_getaffinity(0)) - 1


def _read_chunk(store: bytes, files: Sequence[Found], validate: bool) -> list[tuple[object, ...]]:
    return [_TO_TUPLE(read_file(store, file, validate=validate)) for file in files]
