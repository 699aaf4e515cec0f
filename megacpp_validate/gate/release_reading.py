"""A store of receipts as the gate sees it: every file hashed, and read as far as it takes to say which cell it is of.

Whole receipts are read of those alone that can count (`load`): a store has thousands of others, of other stacks and
older runs, and they are judged by what they say of themselves.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from ..evidence.receipt import READABLE, Outcome, Receipt
from ..evidence.receipt_fields import find_checks
from ..evidence.receipts_manifest import hash_manifest
from ..evidence.store import ReceiptInvalid, parse_receipt
from ..evidence.store_walk import walk_store

_BATCH: Final = 64
_THREADS: Final = 4
_LARGEST: Final = 64 * 2**20  # bytes; the largest receipt there is has 0.8 MB


@dataclass(frozen=True)
class ReceiptHead:
    """What a receipt says of itself."""

    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome
    schema_id: str
    started: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    environment: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    commit: str = ""

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012 - pydantic's name and type


_HEAD: Final = TypeAdapter(ReceiptHead)


def tell_file(file: str) -> str:
    """The name of a file as text: bytes that are no UTF-8 are escaped."""
    return os.fsencode(file).decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class SeenReceipt:
    """One file of a store.

    Attributes:
        file: relative to the store, with `/` between its parts.
        sha256: of its bytes; empty where they could not be read.
        head: None where it is no receipt.
        problem: why it is none.
        leads_out: whether receipts may lie behind it that nobody sees: a link out of the store, a folder that cannot be
            read.
    """

    file: str
    sha256: str
    head: ReceiptHead | None
    problem: str = ""
    leads_out: bool = False

    @property
    def told(self) -> str:
        """Its file as it can be told: bytes that are no UTF-8 as `\\xff`."""
        return tell_file(self.file)

    @property
    def run(self) -> str:
        """The folder that it lies in; "." for the store itself."""
        return str(PurePosixPath(self.told).parent)

    @property
    def stem(self) -> str:
        """The cell that its name says."""
        return PurePosixPath(self.told).name.removesuffix(".json")

    @property
    def cell(self) -> str:
        """The cell that it is of, or that its name says."""
        return self.head.cell if self.head is not None else self.stem


@dataclass(frozen=True)
class SeenStore:
    """Every receipt of a store.

    Attributes:
        folder: where it lies.
        seen: sorted by file.
    """

    folder: Path
    seen: tuple[SeenReceipt, ...]

    @property
    def sha256(self) -> str:
        """Of all of them."""
        return hash_manifest(self.hashes)

    @property
    def hashes(self) -> dict[str, str]:
        """File -> SHA-256."""
        return {seen.file: seen.sha256 for seen in self.seen}

    def load(self, seen: SeenReceipt) -> Receipt:
        """The whole receipt, strictly.

        Raises:
            ReceiptInvalid: it is none, or another file than was hashed.
        """
        path = self.folder / seen.file
        try:
            text = path.read_bytes()
        except OSError as fault:
            raise ReceiptInvalid(path, f"it cannot be read: {fault.strerror or fault}") from fault
        if hashlib.sha256(text).hexdigest() != seen.sha256:
            raise ReceiptInvalid(path, "it was written while the gate read it")
        receipt = parse_receipt(text, path)
        if seen.head is None or any(getattr(receipt, name) != value for name, value in asdict(seen.head).items()):
            raise ReceiptInvalid(path, "it says one thing at a glance and another when it is read whole")
        return receipt


def read_store(folder: Path) -> SeenStore:
    """Every `*.json` below a folder, and whatever else receipts may lie behind that cannot be read.

    Links are told and not followed; what begins with a dot is still being written.

    Raises:
        OSError: there is no such folder, or it cannot be listed.
    """
    places = [(os.fsdecode(place.key), place) for place in walk_store(folder)]
    odd = [SeenReceipt(file, "", None, place.fault, leads_out=True) for file, place in places if place.entry is None]
    files = sorted(file for file, place in places if place.entry is not None)
    batches = [files[start : start + _BATCH] for start in range(0, len(files), _BATCH)]
    # Reading and hashing leave the interpreter to others.
    with ThreadPoolExecutor(_THREADS) as crew:
        seen = crew.map(lambda batch: [_see(folder, file) for file in batch], batches)
        read = [one for batch in seen for one in batch]
    return SeenStore(folder, tuple(sorted([*read, *odd], key=lambda one: one.file) if odd else read))


def find_folders(folder: str) -> Iterator[str]:
    """A folder and every one below it that `read_store` looks into, as far as they can be listed."""
    ahead = [folder]
    while ahead:
        place = ahead.pop()
        yield place
        with suppress(OSError), os.scandir(place) as entries:
            ahead += [one.path for one in entries if not one.name.startswith(".") and one.is_dir(follow_symlinks=False)]


def _see(folder: Path, file: str) -> SeenReceipt:
    path = os.path.join(folder, file)  # noqa: PTH118 - ten thousand of them
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb", buffering=0) as stream:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode):
                return SeenReceipt(file, "", None, "it is no regular file")
            if state.st_size > _LARGEST:
                return SeenReceipt(file, "", None, f"it has {state.st_size} bytes, and none has more than {_LARGEST}")
            text = stream.read()
    except OSError as fault:
        link = Path(path).is_symlink()
        why = "it is a link, and what it points to is no part of the store" if link else fault.strerror or str(fault)
        return SeenReceipt(file, "", None, f"it cannot be read: {why}", link and _leads_out(folder, Path(path)))
    sha256 = hashlib.sha256(text).hexdigest()
    try:
        head = _read_head(text)
    except ValidationError as fault:
        return SeenReceipt(file, sha256, None, _why(text, Path(file), fault))
    if head.schema_id not in READABLE:
        return SeenReceipt(file, sha256, None, f"its schema_id is {head.schema_id!r}, which this tool does not read")
    return SeenReceipt(file, sha256, head)


def _leads_out(folder: Path, link: Path) -> bool:
    """Whether a link ends where the store is not read: outside of it, in what begins with a dot, or nowhere."""
    try:
        inside = link.resolve(strict=True).relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a circle of links is the second
        return True
    return any(part.startswith(".") for part in inside.parts)


def _read_head(text: bytes) -> ReceiptHead:
    """The head, without its checks first, which are nine tenths of the text.

    Whatever is laid out otherwise is read as it is, and so is what counts (`load`).

    Raises:
        ValidationError: it has none.
    """
    with suppress(ValueError):  # another layout, or no head without what was cut
        start, rest = find_checks(text)
        if text.endswith(b"],", 0, rest):
            return _HEAD.validate_json(text[:start] + text[rest:], strict=True)
    return _HEAD.validate_json(text, strict=True)


def _why(text: bytes, path: Path, fault: ValidationError) -> str:
    """What is wrong, every fault named; the head alone would name the first."""
    if other := re.search(rb'"schema_id":\s*"(megacpp-validate/(?!receipt/)[\w./-]{1,60})"', text):
        return f"it is no receipt, but a result of another kind ({other[1].decode()})"
    try:
        parse_receipt(text, path)
    except ReceiptInvalid as found:
        return found.reason
    errors: list[Any] = list(fault.errors())
    return "; ".join(f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in errors)
