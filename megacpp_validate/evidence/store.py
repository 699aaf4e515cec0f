"""The one reader of receipts: what is damaged, edited or contradicts itself is no evidence.

One file is read whole and strictly (`read_receipt`). A store of thousands is walked once (`read_store`): every file is
hashed and read as far as its head, because nine tenths of a receipt are its checks; `ReceiptStore.load` reads those
that matter whole.
"""

from __future__ import annotations

import json
import os
import re
import stat
import statistics
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from .contradictions import find_contradictions
from .receipt import READABLE, SCHEMA_ID, Outcome, Receipt, cell_id
from .strict_json import FileInvalid, read_strict_json

_RECEIPT: Final = TypeAdapter(Receipt)
_LARGEST: Final = 64 << 20  # bytes; the largest receipt that was seen has less than one
_CELL: Final = re.compile(r"[\w.+]+(-[\w.+]+){2,}")  # stack, target and probe, as `cell_id` joins them


class ReceiptInvalid(FileInvalid):
    """A file that is not a receipt."""

    kind = "receipt"
    next_step = "run its cell again"


@dataclass(frozen=True)
class Receipts:
    """What a folder holds.

    Attributes:
        found: by cell.
        unreadable: every invalid file; a cell whose file is one of them is lost, not good.
    """

    found: dict[str, Receipt]
    unreadable: tuple[ReceiptInvalid, ...]


def read_receipt(path: Path) -> Receipt:
    """One receipt.

    Raises:
        ReceiptInvalid: the file cannot be read, is not a receipt, or contradicts itself.
    """
    try:
        text = path.read_bytes()
    except OSError as fault:
        raise ReceiptInvalid(path, f"it cannot be read: {fault.strerror or fault}") from fault
    return parse_receipt(text, path)


def parse_receipt(text: bytes, path: Path) -> Receipt:
    """One receipt from its bytes; its file is not opened, but its name must be that of the cell.

    Raises:
        ReceiptInvalid: the text is not a receipt, or contradicts itself.
    """
    try:
        receipt = _RECEIPT.validate_json(text, strict=True)
        read_strict_json(text)
    except ValidationError as fault:
        raise ReceiptInvalid(path, "; ".join([*_find_later_schema(text), *_list_errors(fault)])) from fault
    except ValueError as fault:
        raise ReceiptInvalid(path, str(fault)) from fault
    if contradictions := "; ".join(find_contradictions(receipt, path)):
        raise ReceiptInvalid(path, contradictions)
    return receipt


def read_receipts(folder: Path) -> Receipts:
    """Every receipt of one folder, invalid files apart; other files than `*.json` are left alone.

    Raises:
        ReceiptInvalid: there is no such folder.
    """
    if not folder.is_dir():
        raise ReceiptInvalid(folder, "there is no such folder")
    found: dict[str, Receipt] = {}
    unreadable: list[ReceiptInvalid] = []
    for path in sorted(folder.glob("*.json")):
        try:
            receipt = read_receipt(path)
        except ReceiptInvalid as fault:
            unreadable.append(fault)
        else:
            found[receipt.cell] = receipt
    return Receipts(found, tuple(unreadable))


def receipt_schema() -> dict[str, Any]:
    """The JSON schema of a receipt, as it is published under `docs/schema/`."""
    schema = _RECEIPT.json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}


# --- A store: a tree of folders, each of them one run. ---


@dataclass(frozen=True)
class _HeadStep:
    seconds: float

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012 - pydantic's name and type


@dataclass(frozen=True)
class _HeadTraining:
    steps: tuple[_HeadStep, ...]

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012


@dataclass(frozen=True)
class _HeadMachine:
    host: str = ""
    gpu: str = ""

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012


@dataclass(frozen=True)
class _HeadJit:
    after: dict[str, int] = field(default_factory=dict)

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012


@dataclass(frozen=True)
class ReceiptHead:
    """What a receipt says of itself, without its checks; fields as in `Receipt`."""

    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome
    schema_id: str
    reason: str = ""
    started: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    environment: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    commit: str = ""
    blocked_by: str = ""
    failure: dict[str, str] | None = None
    peak_memory_mib: float = 0.0
    machine: _HeadMachine = field(default_factory=_HeadMachine)
    jit: _HeadJit = field(default_factory=_HeadJit)
    training: tuple[_HeadTraining, ...] = ()

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012

    @property
    def only_timed(self) -> bool:
        """Whether a good receipt judged nothing: its module was timed a second time, for the noise of the card."""
        return self.outcome.is_good and "probe" not in self.seconds

    @property
    def compiles_after(self) -> int:
        """Kernels that were compiled just in time after warm-up."""
        return sum(self.jit.after.values())

    @property
    def step_seconds(self) -> float | None:
        """Median of a training step of the first run, its first step apart; None where nothing was trained."""
        times = [step.seconds for step in self.training[0].steps] if self.training else []
        return statistics.median(times[1:] or times) if times else None


_HEAD: Final = TypeAdapter(ReceiptHead)
_SAME: Final = ("cell", "stack", "target", "probe", "outcome", "schema_id", "started", "seconds", "environment",
                "image_digest", "lock_hash", "commit")  # fmt: skip


@dataclass(frozen=True)
class ReceiptFile:
    """One file of a store.

    Attributes:
        file: relative to the store, with `/` between its parts.
        sha256: of its bytes; empty where they could not be read.
        head: None where the file is not a receipt.
        problem: why it is not.
        leads_out: whether receipts may lie behind it that nobody sees: a link out of the store, a folder that cannot be
            read.
        other: whether it is whole JSON that does not claim to be a receipt: the result of a verb.
        doubtful: whether its head alone cannot be trusted: a good outcome over a failed check, a key twice, a number
            below 0, another layout. Those that matter are read whole.
    """

    file: str
    sha256: str
    head: ReceiptHead | None
    problem: str = ""
    leads_out: bool = False
    other: bool = False
    doubtful: bool = False

    @cached_property
    def shown(self) -> str:
        """Its file as text: bytes that are not UTF-8 as `\\xff`."""
        return show_file(self.file)

    @cached_property
    def run(self) -> str:
        """The folder that it lies in; "." for the store itself."""
        return str(PurePosixPath(self.shown).parent)

    @cached_property
    def stem(self) -> str:
        """The cell that its name says."""
        return PurePosixPath(self.shown).name.removesuffix(".json")

    @property
    def cell(self) -> str:
        """The cell that it is of, or that its name says."""
        return self.head.cell if self.head is not None else self.stem

    @property
    def claims(self) -> ReceiptHead:
        """Its head.

        Raises:
            ReceiptInvalid: it has none.
        """
        if self.head is None:
            raise ReceiptInvalid(Path(self.file), self.problem)
        return self.head


@dataclass(frozen=True)
class ReceiptStore:
    """Every receipt of a store.

    Attributes:
        folder: where it lies.
        files: sorted by file.
    """

    folder: Path
    files: tuple[ReceiptFile, ...]

    @property
    def hashes(self) -> dict[str, str]:
        """File -> SHA-256."""
        return {one.file: one.sha256 for one in self.files}

    def load(self, one: ReceiptFile) -> Receipt:
        """The whole receipt, strictly.

        Raises:
            ReceiptInvalid: the file is invalid, or is no longer the one that was hashed.
        """
        path = self.folder / one.file
        if one.head is None:
            raise ReceiptInvalid(path, one.problem)
        try:
            text = path.read_bytes()
        except OSError as fault:
            raise ReceiptInvalid(path, f"it cannot be read: {fault.strerror or fault}") from fault
        if sha256(text).hexdigest() != one.sha256:
            raise ReceiptInvalid(path, "it was written while it was read")
        receipt = parse_receipt(text, path)
        if any(getattr(receipt, name) != getattr(one.head, name) for name in _SAME):
            raise ReceiptInvalid(path, "its head differs from the whole file")
        return receipt


def read_store(folder: Path) -> ReceiptStore:
    """Every `*.json` below a folder, and whatever else receipts may lie behind that cannot be read.

    Links are listed and not followed; names that begin with a dot are still being written, or not for evidence.

    Raises:
        OSError: there is no such folder, or it cannot be listed.
    """
    return ReceiptStore(folder, tuple(sorted(_read_files(folder), key=lambda one: one.file)))


def show_file(file: str) -> str:
    """The name of a file as text: bytes that are not UTF-8 are escaped."""
    return os.fsencode(file).decode("utf-8", "backslashreplace")


def _read_files(folder: Path) -> Iterator[ReceiptFile]:
    root, ahead = os.fspath(folder), [""]
    while ahead:
        below = ahead.pop()
        try:
            with os.scandir(f"{root}/{below}" if below else root) as entries:
                listed = [one for one in entries if not one.name.startswith(".")]
        except OSError as fault:
            if not below:
                raise
            why = f"the folder cannot be read: {fault.strerror or fault}"
            yield ReceiptFile(below, "", None, why, leads_out=True)
            continue
        for entry in listed:
            file = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                ahead.append(file)
            elif entry.is_symlink():
                if entry.name.endswith(".json") or not Path(entry.path).is_file():  # a folder may hide receipts
                    why = "it cannot be read: it is a link, and what it points to is no part of the store"
                    yield ReceiptFile(file, "", None, why, _leads_out(folder, Path(entry.path)))
            elif entry.name.endswith(".json"):
                yield _read_file(entry.path, file)


def _leads_out(folder: Path, link: Path) -> bool:
    """Whether a link ends where the store is not read: outside of it, in what begins with a dot, or nowhere."""
    try:
        inside = link.resolve(strict=True).relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a circle of links is the second
        return True
    return any(part.startswith(".") for part in inside.parts)


def _read_file(path: str, file: str) -> ReceiptFile:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
        with os.fdopen(handle, "rb", buffering=0) as stream:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode):
                return ReceiptFile(file, "", None, "it is no regular file")
            if state.st_size > _LARGEST:
                return ReceiptFile(file, "", None, f"it has {state.st_size} bytes, more than any receipt ({_LARGEST})")
            text = stream.read()
    except OSError as fault:
        return ReceiptFile(file, "", None, f"it cannot be read: {fault.strerror or fault}")
    digest = sha256(text).hexdigest()
    try:
        head, doubtful = _read_head(text)
    except ValidationError as fault:
        return _explain(text, file, digest, fault)
    if head.schema_id not in READABLE:
        why = f"its schema_id is {head.schema_id!r}, which this tool does not read"
        return ReceiptFile(file, digest, None, why)
    return ReceiptFile(file, digest, head, doubtful=doubtful)


# In a text laid out as `receipt_text` writes it, two spaces behind a line end begin a key of the receipt itself: no
# string of JSON holds a line end. So the checks end where the last "backends" begin.
_CHECKS: Final = b'\n  "checks": ['
_AFTER_CHECKS: Final = b'\n  "backends": '
_FAILED: Final = b'\n      "passed": false'  # of a check; of a part it stands deeper
_KEY: Final = re.compile(rb'\n  "(\w+)"')


def _read_head(text: bytes) -> tuple[ReceiptHead, bool]:
    """The head, and whether it is doubtful.

    Raises:
        ValidationError: the text has none.
    """
    start, rest = text.find(_CHECKS), text.rfind(_AFTER_CHECKS)
    if 0 <= start < rest and text.endswith(b"],", 0, rest):
        with suppress(ValidationError):  # no head without what was cut
            short = text[:start] + text[rest:]
            head = _HEAD.validate_json(short, strict=True)
            keys = _KEY.findall(short)
            empty = text.endswith(_CHECKS + b"],", 0, rest)
            return head, len(keys) != len(set(keys)) or _is_doubtful(head, text.find(_FAILED, start, rest) >= 0, empty)
    return _HEAD.validate_json(text, strict=True), True


def _is_doubtful(head: ReceiptHead, failed: bool, empty: bool) -> bool:
    numbers = [head.peak_memory_mib, *head.seconds.values(), *head.jit.after.values()]
    if head.cell != cell_id(head.stack, head.target, head.probe) or not all(number >= 0 for number in numbers):
        return True
    if head.outcome.is_good:
        return failed or empty or bool(head.blocked_by) or head.failure is not None
    return (head.outcome is Outcome.FAIL and not failed) or (head.outcome is Outcome.BLOCKED and not head.blocked_by)


def _explain(text: bytes, file: str, digest: str, fault: ValidationError) -> ReceiptFile:
    """A file without a head: another file, or a damaged receipt with every fault named."""
    other = _is_other(text, PurePosixPath(show_file(file)).stem)
    if named := re.search(rb'"schema_id":\s*"(megacpp-validate/(?!receipt/)[\w./-]{1,60})"', text):
        why = f"it is no receipt, but a result of another kind ({named[1].decode()})"
        return ReceiptFile(file, digest, None, why, other=other)
    try:
        parse_receipt(text, Path(file))
        why = "; ".join(_list_errors(fault))
    except ReceiptInvalid as found:
        why = found.reason
    return ReceiptFile(file, digest, None, why, other=other)


def _is_other(text: bytes, stem: str) -> bool:
    """What lies under the name of a cell and does not say what else it is was a receipt that something overwrote."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    schema = data.get("schema_id") if isinstance(data, dict) else None
    if (isinstance(data, dict) and "cell" in data) or str(schema).startswith("megacpp-validate/receipt/"):
        return False
    return (isinstance(schema, str) and schema != "") or not _CELL.fullmatch(stem)


def _list_errors(fault: ValidationError) -> Iterable[str]:
    return (f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in fault.errors())


def _find_later_schema(text: bytes) -> Iterator[str]:
    """Which version a text says it is, where this tool does not read it: its new keys would not say so."""
    named = re.search(rb'"schema_id":\s*"(megacpp-validate/receipt/[0-9]+)"', text)
    if named and (schema_id := named[1].decode()) not in READABLE:
        yield f"schema_id is {schema_id!r}, and this tool reads no other than {READABLE[0]!r} to {SCHEMA_ID!r}"
