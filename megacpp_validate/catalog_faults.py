"""The faults by which the blame is scored: `matrix/te_faults.toml` as typed values, and one edit done to one text.

A file is refused as a whole, with every fault in it named at once, as `catalog` does it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from .catalog import MatrixInvalid, Row, matrix_folder
from .evidence.findings import Cause
from .evidence.upgrade import ENVIRONMENT

FILE: Final = "te_faults.toml"
_RELEASE: Final = r"^\d+(\.\d+)+(\.post\d+)?$"
_BELOW: Final = r"^[A-Za-z0-9_]+(/[A-Za-z0-9_]+)*\.py$"  # no "..", no absolute path: nothing outside of the copy

Release = Annotated[str, Field(pattern=_RELEASE)]
StrictCause = Annotated[Cause, Field(strict=False)]


class EditDoesNotFit(ValueError):
    """An edit whose text does not stand in a file of Transformer Engine exactly once."""


class Edit(Row):
    """One change to one file: another text for one that is there, text at its end, or the file itself.

    Attributes:
        file: below `transformer_engine/`.
        releases: those that it is for; all of the fault's where there is none.
        old, new: whole lines; `old` stands in the file exactly once. A text begins after its first line break.
        append: lines for the end of the file.
        delete: whether the file is removed.
        rename: where it is moved to, below `transformer_engine/`.
    """

    file: str = Field(pattern=_BELOW)
    releases: list[Release] = Field(default_factory=list)
    old: str = ""
    new: str = ""
    append: str = ""
    delete: bool = False
    rename: str = Field(default="", pattern=rf"^$|{_BELOW}")

    def change(self, text: str) -> str:
        """The text of the file after this edit.

        Raises:
            EditDoesNotFit: `old` stands there never, or more than once.
        """
        if not self.old:
            return text + self.append
        if (count := text.count(self.old)) != 1:
            first = self.old.strip().splitlines()[0]
            raise EditDoesNotFit(
                f"{self.file} has the lines that begin with {first!r} {count} times, and an edit wants them once. "
                "Likely cause: it was written for another release. Next step: give it a text for this one."
            )
        return text.replace(self.old, self.new)


class TeFault(Row):
    """A fault that is planted in a copy of Transformer Engine.

    Attributes:
        id: short and stable.
        module: the bridge module that must be blamed: the first in dependency order whose probe can see it.
        cause: the class that must be named.
        accepts: classes that are right as well, where the message of a failure leaves it open.
        also: names that are right as well; "environment" where all modules share it.
        releases: of Transformer Engine that it is written for.
        times: seen in timings only, so the modules are timed.
        says: what it is, and why that module sees it first.
        edit: what is changed, in order.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    module: str
    cause: StrictCause
    accepts: list[StrictCause] = Field(default_factory=list)
    also: list[str] = Field(default_factory=list)
    releases: list[Release] = Field(min_length=1)
    times: bool = False
    says: str = Field(min_length=1)
    edit: list[Edit] = Field(min_length=1)

    def edits_for(self, release: str) -> tuple[Edit, ...]:
        """Those for one release, in order."""
        return tuple(edit for edit in self.edit if not edit.releases or release in edit.releases)

    @property
    def names(self) -> frozenset[str]:
        """Who may be blamed."""
        return frozenset({self.module, *self.also})

    @property
    def causes(self) -> frozenset[Cause]:
        """Classes that may be named."""
        return frozenset({self.cause, *self.accepts})


class _File(Row):
    fault: list[TeFault] = Field(min_length=1)


def read_te_faults(modules: Iterable[str], folder: Path | None = None) -> tuple[TeFault, ...]:
    """The faults in their order.

    Args:
        modules: ids of the bridge modules.
        folder: of the matrix.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    path = (folder or matrix_folder()) / FILE
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise MatrixInvalid([f"{FILE}: cannot be read: {fault}"]) from fault
    try:
        faults = _File.model_validate(data).fault
    except ValidationError as invalid:
        raise MatrixInvalid(_say(data, invalid)) from invalid
    if wrong := list(_find_wrong(faults, frozenset(modules))):
        raise MatrixInvalid(wrong)
    return tuple(faults)


def _say(data: dict[str, Any], invalid: ValidationError) -> Iterator[str]:
    """What is wrong with the types, each with the id of its row."""
    rows = data.get("fault")
    for error in invalid.errors():
        where = ".".join(map(str, error["loc"]))
        index = error["loc"][1] if len(error["loc"]) > 1 else None
        row = rows[index] if isinstance(rows, list) and isinstance(index, int) and index < len(rows) else None
        named = f" ({row['id']})" if isinstance(row, dict) and "id" in row else ""
        yield f"{FILE}: {where}{named}: {error['msg']} (found {error['input']!r:.60})"


def _find_wrong(faults: list[TeFault], modules: frozenset[str]) -> Iterator[str]:
    seen: set[str] = set()
    for fault in faults:
        name = f"{FILE}: fault {fault.id}"
        if fault.id in seen:
            yield f"{name}: is there more than once"
        seen.add(fault.id)
        for other in sorted(fault.names - modules - {ENVIRONMENT}):
            yield f"{name}: names {other!r}, which is no bridge module"
        if fault.module == ENVIRONMENT:
            yield f"{name}: names a module, or nobody could say where it is seen first"
        for edit in fault.edit:
            yield from (f"{name}: {edit.file}: {what}" for what in _why_no_edit(edit, fault))
        for release in fault.releases:
            if not fault.edits_for(release):
                yield f"{name}: has no edit for {release}"


def _why_no_edit(edit: Edit, fault: TeFault) -> Iterator[str]:
    deeds = [bool(edit.old), bool(edit.append), edit.delete, bool(edit.rename)]
    if sum(deeds) != 1:
        yield "an edit does one thing: old and new, append, delete or rename"
    if edit.old and edit.old == edit.new:
        yield "old and new are the same"
    if edit.new and not edit.old:
        yield "new without old"
    yield from (f"is for {release}, and the fault is not" for release in edit.releases if release not in fault.releases)
