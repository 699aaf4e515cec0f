"""The files of a store: found without leaving one out, and each read into a row of the index."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from .index_schema import OTHER, RECEIPT, UNREADABLE, FileRow
from .receipt_fields import Fields, is_another_file, read_fields, shorten_reason, validate_fields
from .receipt_phases import PROBE, is_only_timed
from .receipt_time import read_time
from .store import ReceiptInvalid
from .store_walk import walk_store

_LARGEST: Final = 64 << 20  # bytes; the largest receipt that was seen has less than one
# A file that is written twice within a tick of the file system's clock has one time: what is younger than this when it
# is read is read again next time. Kernels tick every 1 to 10 ms; FAT and some network shares have seconds.
_YOUNG: Final = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """One file of a store, not yet read.

    Attributes:
        key: its path below the store, as the file system's bytes.
        stamp: size, times and inode: a file that has the same is the same.
        fault: why it cannot be read; empty where it can.
    """

    key: bytes
    stamp: str
    fault: str = ""


def find_files(store: Path) -> Iterator[Found]:
    """Every place of a store.

    Raises:
        OSError: the store itself cannot be read.
    """
    for place in walk_store(store):
        yield Found(place.key, "", place.fault) if place.entry is None else _find_file(place.entry, place.key)


def read_file(store: bytes, found: Found, *, validate: bool) -> FileRow:
    """One file as a row: a receipt, what should be one, or another file.

    Args:
        validate: read it in full.
    """
    if found.fault:
        return make_unreadable(found, found.fault)
    path = store + b"/" + found.key
    started = time.time()
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(handle)
            text = os.read(handle, state.st_size + 1)  # a regular file gives what it has, up to 2 GB at once
        finally:
            os.close(handle)
    except OSError as fault:
        return make_unreadable(found, f"it cannot be read: {fault.strerror or fault}")
    stamp = _stamp(state) if max(state.st_mtime, state.st_ctime) < started - _YOUNG else ""
    return _read_text(text, Found(found.key, stamp), validate=validate)


def make_unreadable(found: Found, fault: str, digest: str = "") -> FileRow:
    """The row of a file that is no evidence; its cell is what its name says."""
    return FileRow(
        key=found.key,
        stamp=found.stamp,
        kind=UNREADABLE,
        sha256=digest,
        path=_show(found.key),
        run=_run_of(found.key),
        cell=_name_cell(found.key),
        fault=_storable(shorten_reason(fault)),
    )


def _find_file(entry: os.DirEntry[bytes], key: bytes) -> Found:
    try:
        state = entry.stat(follow_symlinks=False)
    except OSError as fault:
        return Found(key, "", f"it cannot be read: {fault.strerror or fault}")
    if stat.S_ISLNK(state.st_mode):
        return Found(key, "", "it is a link, and what it points to is no part of the store")
    if not stat.S_ISREG(state.st_mode):  # to open a pipe would wait for who writes to it
        return Found(key, "", "it is no regular file")
    if state.st_size > _LARGEST:
        return Found(key, "", f"it has {state.st_size} bytes, more than any receipt ({_LARGEST})")
    return Found(key, _stamp(state))


def _stamp(state: os.stat_result) -> str:
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}"


def _read_text(text: bytes, found: Found, *, validate: bool) -> FileRow:
    digest = sha256(text).hexdigest()
    path = Path(os.fsdecode(found.key))
    try:
        fields = validate_fields(text, path) if validate else read_fields(text, path)
    except ReceiptInvalid as fault:
        if is_another_file(text, path):
            return FileRow(found.key, found.stamp, OTHER, digest, _show(found.key), _run_of(found.key))
        return make_unreadable(found, fault.reason, digest)
    return _make_row(fields, found, digest)


def _make_row(fields: Fields, found: Found, digest: str) -> FileRow:
    texts = {name: _storable(value) for name, value in fields.texts.items()}
    texts["reason"] = shorten_reason(texts["reason"])
    return FileRow(
        key=found.key,
        stamp=found.stamp,
        kind=RECEIPT,
        sha256=digest,
        path=_show(found.key),
        run=_run_of(found.key),
        outcome=fields.outcome.value,
        at=started.timestamp() if (started := read_time(texts["started"])) else None,
        validated=int(fields.validated),
        only_timed=int(is_only_timed(fields.outcome, fields.seconds)),
        seconds_total=fields.seconds.get("total"),
        seconds_probe=fields.seconds.get(PROBE),
        peak_memory_mib=fields.peak_memory_mib,
        compiles_after=fields.compiles_after,
        step_seconds=fields.numbers.get("step_seconds"),
        numbers=json.dumps(fields.numbers),
        **texts,
    )


def _show(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")


def _name_cell(key: bytes) -> str:
    name = _show(key.rpartition(b"/")[2])
    return name.removesuffix(".json") if name.endswith(".json") else ""  # a folder is of no cell


def _run_of(key: bytes) -> str:
    return _show(key.rpartition(b"/")[0]) or "."


def _storable(text: str) -> str:
    """Text that a database takes: half a character as its escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
