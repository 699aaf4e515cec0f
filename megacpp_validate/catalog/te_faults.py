"""Faults that are planted in copies of Transformer Engine: rows of the matrix as typed values, and one edit of a text.

`matrix/te_faults.toml` has those by which the blame is scored; `catalog_fp8_faults` reads others of the same kind.

A file is refused as a whole, with every fault in it named at once, as `catalog` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, Generic, TypeVar

from pydantic import Field

from ..evidence.values import ENVIRONMENT, Cause
from .file import MatrixInvalid, Row, matrix_folder, read_matrix_file

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


class PlantedFault(Row):
    """A fault that is planted in a copy of Transformer Engine.

    Attributes:
        id: short and stable.
        releases: of Transformer Engine that it is written for.
        says: what it is.
        edit: what is changed, in order.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    releases: list[Release] = Field(min_length=1)
    says: str = Field(min_length=1)
    edit: list[Edit] = Field(min_length=1)

    def edits_for(self, release: str) -> tuple[Edit, ...]:
        """Those for one release, in order."""
        return tuple(edit for edit in self.edit if not edit.releases or release in edit.releases)


class TeFault(PlantedFault):
    """A fault by which the blame is scored. What it `says` tells why its module sees it first, too.

    Attributes:
        module: the bridge module that must be blamed: the first in dependency order whose probe can see it.
        cause: the class that must be named.
        accepts: classes that are right as well, where the message of a failure leaves it open.
        also: names that are right as well; "environment" where all modules share it.
        times: seen in timings only, so the modules are timed.
    """

    module: str
    cause: StrictCause
    accepts: list[StrictCause] = Field(default_factory=list)
    also: list[str] = Field(default_factory=list)
    times: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Who may be blamed."""
        return frozenset({self.module, *self.also})

    @property
    def causes(self) -> frozenset[Cause]:
        """Classes that may be named."""
        return frozenset({self.cause, *self.accepts})


Fault = TypeVar("Fault", bound=PlantedFault)


class FaultFile(Row, Generic[Fault]):
    """A file of rows of one kind."""

    fault: list[Fault] = Field(min_length=1)


def read_te_faults(modules: Iterable[str], folder: Path | None = None) -> tuple[TeFault, ...]:
    """The faults in their order.

    Args:
        modules: ids of the bridge modules.
        folder: of the matrix.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    path = (folder or matrix_folder()) / FILE
    known = frozenset(modules)
    return read_fault_file(path, FaultFile[TeFault], lambda fault: _find_wrong(fault, known))


def read_fault_file(
    path: Path, model: type[FaultFile[Fault]], find_wrong: Callable[[Fault], Iterable[str]]
) -> tuple[Fault, ...]:
    """The faults of one file in their order.

    Args:
        path: of the file.
        model: what a row of it is.
        find_wrong: what else is wrong with a row, in words.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    faults = read_matrix_file(path, model).fault
    seen: set[str] = set()
    wrong = []
    for fault in faults:
        said = [*(["is there more than once"] if fault.id in seen else []), *find_wrong(fault), *_find_unfit(fault)]
        wrong += [f"{path.name}: fault {fault.id}: {what}" for what in said]
        seen.add(fault.id)
    if wrong:
        raise MatrixInvalid(wrong)
    return tuple(faults)


def _find_wrong(fault: TeFault, modules: frozenset[str]) -> Iterator[str]:
    """Who is named that there is not."""
    for other in sorted(fault.names - modules - {ENVIRONMENT}):
        yield f"names {other!r}, which is no bridge module"
    if fault.module == ENVIRONMENT:
        yield "names a module, or nobody could say where it is seen first"


def _find_unfit(fault: PlantedFault) -> Iterator[str]:
    """Edits that cannot be done, and releases that nothing is edited in."""
    for edit in fault.edit:
        yield from (f"{edit.file}: {what}" for what in _why_no_edit(edit, fault))
    yield from (f"has no edit for {release}" for release in fault.releases if not fault.edits_for(release))


def _why_no_edit(edit: Edit, fault: PlantedFault) -> Iterator[str]:
    deeds = [bool(edit.old), bool(edit.append), edit.delete, bool(edit.rename)]
    if sum(deeds) != 1:
        yield "an edit does one thing: old and new, append, delete or rename"
    if edit.old and edit.old == edit.new:
        yield "old and new are the same"
    if edit.new and not edit.old:
        yield "new without old"
    yield from (f"is for {release}, and the fault is not" for release in edit.releases if release not in fault.releases)
