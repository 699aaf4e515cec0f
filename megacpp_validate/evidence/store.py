"""The reader of receipts. Damaged files, files that were changed after sealing and contradictory ones are refused.

`read_receipt` reads one whole file. `read_store` walks a store of thousands once: it verifies the seals of files and
reads their heads, because nine tenths of a receipt are checks; `ReceiptStore.load` reads the rest.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pydantic import AliasPath, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, computed_field

from ..errors import FileInvalid, WrongArguments
from .packed import unpack
from .receipt import SCHEMA_ID, Check, Outcome, Receipt, TrainingRecord, cell_id, is_sealed
from .values import list_errors

SUFFIXES: Final = (".json", ".json.xz")  # as written, and as it may be kept; the seal is over the unpacked content
_RECEIPT: Final = TypeAdapter(Receipt)
_CELL: Final = re.compile(r"[\w.+]+(-[\w.+]+){2,}")  # stack, target and probe, as `cell_id` joins them
_SCHEMA: Final = re.compile(rb'"schema_id":\s*"(megacpp-validate/[\w./-]{1,60})"')


class ReceiptInvalid(FileInvalid):
    """A file that is not a receipt."""

    kind = "receipt"
    next_step = "run its cell again"


@dataclass(frozen=True)
class Receipts:
    """The receipts of a folder.

    Attributes:
        found: by cell.
        unreadable: every invalid file; its cell has no evidence.
    """

    found: dict[str, Receipt]
    unreadable: tuple[ReceiptInvalid, ...]


def read_receipt(path: Path) -> Receipt:
    """One receipt.

    Raises:
        ReceiptInvalid: the file cannot be read, is not a receipt, or contradicts itself.
    """
    try:
        return parse_receipt(path.read_bytes(), path)
    except OSError as fault:
        raise ReceiptInvalid(path, f"it cannot be read: {fault.strerror or fault}") from fault


def parse_receipt(content: bytes, path: Path) -> Receipt:
    """One receipt from the bytes of its file, which is not opened; its name must be that of the cell.

    Raises:
        OSError: the content cannot be unpacked.
        ReceiptInvalid: the text is not a receipt, is not sealed, or contradicts itself.
    """
    text = unpack(content, path)
    named = _SCHEMA.search(text)
    if named and (schema := named[1].decode()) != SCHEMA_ID:
        raise ReceiptInvalid(path, f"its schema_id is {schema!r}, and {SCHEMA_ID!r} alone is read")
    try:
        receipt = _RECEIPT.validate_json(text, strict=True)
    except ValidationError as fault:
        raise ReceiptInvalid(path, list_errors(fault)) from fault
    if not is_sealed(text):
        raise ReceiptInvalid(path, "its seal does not fit its content: it has none, or was changed after it was sealed")
    if contradictions := "; ".join(_find_contradictions(receipt, path)):
        raise ReceiptInvalid(path, contradictions)
    return receipt


def cell_of(file: str) -> str:
    """Cell that the name of a receipt's file says."""
    return PurePosixPath(file).name.removesuffix(".xz").removesuffix(".json")


def read_receipts(folder: Path) -> Receipts:
    """Every receipt of one folder, and its invalid files; only files with one of `SUFFIXES` are read.

    Raises:
        WrongArguments: there is no such folder.
    """
    if not folder.is_dir():
        raise WrongArguments(
            f"there is no such folder: {folder}. Likely cause: a typing error, or its run never began. Next step: give "
            "the folder of receipts of one stack."
        )
    found: dict[str, Receipt] = {}
    unreadable: list[ReceiptInvalid] = []
    for path in sorted(path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}")):
        try:
            receipt = read_receipt(path)
        except ReceiptInvalid as fault:
            unreadable.append(fault)
        else:
            found[receipt.cell] = receipt
    return Receipts(found, tuple(unreadable))


def json_schema(form: type, schema_id: str) -> dict[str, Any]:
    """The JSON schema of a receipt or a loss curve, as it is published under `docs/schema/`."""
    schema = TypeAdapter(form).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": schema_id, **schema}


# --- A broken producer seals its receipts too: outcomes and verdicts are derived again from their numbers. ---


def _find_contradictions(receipt: Receipt, path: Path) -> Iterator[str]:
    """Contradictions in a receipt."""
    failed = [check.name for check in receipt.checks if not check.passed]
    outcome, good = receipt.outcome, receipt.outcome.is_good
    for wrong, text in (
        (receipt.cell != cell_id(receipt.stack, receipt.target, receipt.probe),
         f"cell {receipt.cell!r} is not stack, target and probe joined"),
        (cell_of(path.name) != receipt.cell, f"it holds the cell {receipt.cell!r}, which its name does not say"),
        (good and failed, f"outcome {outcome} with the failed check {', '.join(failed[:1])}"),
        (good and not receipt.checks, f"outcome {outcome} with no check at all"),
        (len({check.name for check in receipt.checks}) < len(receipt.checks), "it has a check twice"),
        (outcome is Outcome.PASS and receipt.machine.gpu and not receipt.libraries, "no library as loaded on a GPU"),
        (good and receipt.failure, f"outcome {outcome} over the failure {receipt.failure and receipt.failure.type}"),
        (good and receipt.blocked_by, f"outcome {outcome}, and blocked by {receipt.blocked_by}"),
        (good and not all(map(_is_whole, receipt.training)), f"outcome {outcome} over a training run with a bad step"),
        (outcome is Outcome.FAIL and not failed, "outcome fail without a failed check"),
        (outcome is Outcome.BLOCKED and not receipt.blocked_by, "outcome blocked, and not by which cell"),
    ):  # fmt: skip
        if wrong:
            yield text
    for check in receipt.checks:
        yield from _find_false_verdicts(check)
    if outcome is Outcome.PASS:
        yield from _find_false_backends(receipt)


def _is_whole(record: TrainingRecord) -> bool:
    """Whether the steps of a run are consecutive and have a finite loss and gradient norm."""
    steps = record.steps
    follow = all(after.step == before.step + 1 for before, after in pairwise(steps))
    return follow and all(None not in (step.loss, step.grad_norm) for step in steps)


def _find_false_verdicts(check: Check) -> Iterator[str]:
    """Verdicts that do not follow from their numbers by the rules of `probes.bounds`."""
    for part in check.parts:
        said = f"check {check.name}: its part {part.name}"
        if not part.derivation:
            yield f"{said} has a bound without a derivation"
        if part.observed is None or part.bound is None or math.isinf(part.bound):
            # A failed check may have NaN or Inf: its other parts show the failure.
            if check.passed:
                yield f"{said} has no number, and the check passed"
        elif part.name == "relative-error" and (part.bound >= 1.0 or part.observed < 0.0):
            yield f"{said} is {part.observed:g}, and its bound {part.bound:g}: zeros would pass, or it is below 0"
        elif part.passed is not (part.observed >= part.bound if part.at_least else part.observed <= part.bound):
            yield f"{said} has passed={part.passed}, which {part.observed:g} and its bound {part.bound:g} deny"
        if check.passed and not part.passed:
            yield f"{said} failed, and the check passed"


def _find_false_backends(receipt: Receipt) -> Iterator[str]:
    """Paths of a passing cell that did not run what was requested."""
    said = [check for check in receipt.checks if check.name.endswith(".backend")]
    if said and not receipt.backends:
        yield f"{len(said)} checks of the path that was taken, the first is {said[0].name}, and no path is on record"
    ran = {row.detail for row in receipt.backends}
    if denied := [check for check in said if ", seen " in check.detail and check.detail not in ran]:
        yield f"check {denied[0].name} says {denied[0].detail!r}, which no path on record did"
    for row in receipt.backends:
        took_te = row.claimed == "te" and "te" in row.observed
        any_te = "te" in (row.requested, row.claimed, *row.observed)
        if (row.requested == "te" and not took_te) or (receipt.requested == "native" and any_te):
            shown = f"{row.path} requested {row.requested}, claims {row.claimed}, shows {', '.join(row.observed)}"
            yield f"outcome pass where {receipt.requested} was requested, and the path {shown}"


# --- A store: a tree of folders, each of them one run. ---


class ReceiptHead(BaseModel):
    """The fields of a receipt that stores and histories use; as in `Receipt` and below it.

    Attributes:
        after: library -> kernels that were compiled just in time after warm-up.
        model, precision, preset: of its first training run.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome
    schema_id: str
    reason: str = ""
    started: str = ""
    seconds: dict[str, float] = {}
    environment: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    commit: str = ""
    peak_memory_mib: float = 0.0
    host: str = Field(default="", validation_alias=AliasPath("machine", "host"))
    gpu: str = Field(default="", validation_alias=AliasPath("machine", "gpu"))
    after: dict[str, int] = Field(default={}, validation_alias=AliasPath("jit", "after"))
    model: str = Field(default="", validation_alias=AliasPath("training", 0, "model"), exclude=True)
    precision: str = Field(default="", validation_alias=AliasPath("training", 0, "precision"), exclude=True)
    preset: str = Field(default="", validation_alias=AliasPath("training", 0, "features", "preset"), exclude=True)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def only_timed(self) -> bool:
        """Whether a good receipt has only times: a second run that measures the noise of the card."""
        return self.outcome is not None and self.outcome.is_good and "probe" not in self.seconds


@dataclass(frozen=True)
class ReceiptFile:
    """One file of a store.

    Attributes:
        file: relative to the store, with `/` between its parts; bytes that are not UTF-8 are escaped.
        sha256: of the file; empty if it could not be read.
        head: None if the file is not a receipt, or was changed after sealing.
        problem: why there is no head.
        hides: whether it may hide receipts: a link out of the store, or a folder that cannot be read.
    """

    file: str
    sha256: str
    head: ReceiptHead | None
    problem: str = ""
    hides: bool = False

    @cached_property
    def run(self) -> str:
        """Folder of the file; "." for the store itself."""
        return str(PurePosixPath(self.file).parent)

    @cached_property
    def stem(self) -> str:
        """Cell in the name of the file."""
        return cell_of(self.file)

    @property
    def cell(self) -> str:
        """Cell of the receipt, else the cell in its file name."""
        return self.head.cell if self.head is not None else self.stem

    @property
    def claims(self) -> ReceiptHead:
        """The head.

        Raises:
            ReceiptInvalid: there is none.
        """
        if self.head is None:
            raise ReceiptInvalid(Path(self.file), self.problem)
        return self.head


@dataclass(frozen=True)
class ReceiptStore:
    """Every receipt below a folder; `files` are sorted by file."""

    folder: Path
    files: tuple[ReceiptFile, ...]

    @property
    def hashes(self) -> dict[str, str]:
        """File -> SHA-256."""
        return {one.file: one.sha256 for one in self.files}

    def load(self, one: ReceiptFile) -> Receipt:
        """The whole receipt.

        Raises:
            ReceiptInvalid: the file is invalid, or has changed since it was hashed.
        """
        path = self.folder / one.file
        if one.head is None:
            raise ReceiptInvalid(path, one.problem)
        try:
            content = path.read_bytes()
        except OSError as fault:
            raise ReceiptInvalid(path, f"it cannot be read: {fault.strerror or fault}") from fault
        if sha256(content).hexdigest() != one.sha256:
            raise ReceiptInvalid(path, "it was written while it was read")
        return parse_receipt(content, path)


def read_store(folder: Path) -> ReceiptStore:
    """Every file below a folder that is or should be a receipt, and links and closed folders, which may hide some.

    Only names with one of `SUFFIXES` are read, none that begins with a dot. Links are listed and not followed.

    Raises:
        WrongArguments: there is no such folder, or it cannot be listed.
    """
    return ReceiptStore(folder, tuple(sorted(_read_files(folder), key=lambda one: one.file)))


def _read_files(folder: Path) -> Iterator[ReceiptFile]:
    root, closed = os.path.realpath(folder), list[OSError]()
    for place, folders, files in os.walk(root, onerror=closed.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (*folders, *(name for name in files if not name.startswith("."))):
            path = Path(place, name)
            file = _show(path.relative_to(root))
            if path.is_symlink():
                if name.endswith(SUFFIXES) or not path.is_file():  # a folder may hide receipts
                    hides = not Path(os.path.realpath(path)).is_relative_to(root)
                    yield ReceiptFile(file, "", None, "it cannot be read: it is a link, which is not followed", hides)
            elif name in files and (found := _read_file(path, file)) is not None:
                yield found
    for fault in closed:
        if fault.filename == root:
            raise WrongArguments(
                f"the folder {folder} cannot be read: {fault.strerror or fault}. Likely cause: nothing has run here, "
                "or the receipts lie elsewhere. Next step: give the folder that holds them."
            ) from fault
        file, problem = _show(Path(fault.filename).relative_to(root)), fault.strerror or str(fault)
        yield ReceiptFile(file, "", None, f"the folder cannot be read: {problem}", hides=True)


def _show(file: Path) -> str:
    """The name of a file as text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(file).decode("utf-8", "backslashreplace")


def _read_file(path: Path, file: str) -> ReceiptFile | None:
    """The file as an entry of the store; None for a file that is not JSON, or other JSON."""
    if not path.name.endswith(SUFFIXES):
        return None
    if not path.is_file():  # opening a pipe blocks until somebody writes to it
        return ReceiptFile(file, "", None, "it is not a regular file")
    try:
        content = path.read_bytes()
        text = unpack(content, path)
    except OSError as fault:
        return ReceiptFile(file, "", None, f"it cannot be read: {fault.strerror or fault}")
    digest = sha256(content).hexdigest()
    if is_sealed(text) and (head := _read_head(text)) is not None:
        return ReceiptFile(file, digest, head)
    if not _claims_to_be_a_receipt(text, cell_of(file)):
        return None
    try:
        parse_receipt(content, Path(file))
    except ReceiptInvalid as fault:
        return ReceiptFile(file, digest, None, fault.reason)
    return ReceiptFile(file, digest, None, "it is not a receipt")


def _read_head(text: bytes) -> ReceiptHead | None:
    """The head of a sealed receipt; None where a field of it is missing, or its schema is unknown."""
    with suppress(ValidationError):
        head = ReceiptHead.model_validate_json(text, strict=True)
        return head if head.schema_id == SCHEMA_ID else None
    return None


def _claims_to_be_a_receipt(text: bytes, stem: str) -> bool:
    """Whether a file has the schema of a receipt, or the name of a cell and no schema."""
    named = _SCHEMA.search(text)
    return named[1].startswith(b"megacpp-validate/receipt/") if named else bool(_CELL.fullmatch(stem))
