"""Files of the matrix as typed values, or every fault of them in one error.

A row is a pydantic model. A field that names other rows is marked with `Names`, which gets the ids from `read_rows`.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from ..errors import WrongArguments

PACKAGE_ROOT: Final = Path(__file__).parents[1]
_MOST_ALLOWED: Final = 12  # ids that a fault lists


class MatrixInvalid(WrongArguments):
    """One or more files of the matrix are wrong; `faults` names every fault, one a line."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        lines = "\n".join(f"  {fault}" for fault in self.faults)
        super().__init__(f"{len(self.faults)} fault(s) in TOML files:\n{lines}\nNext step: correct each line above.")


class Row(BaseModel):
    """A row of the matrix: frozen, and strict about its keys and types.

    Attributes:
        named_by: fields that tell the rows of a kind apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
    named_by: ClassVar[tuple[str, ...]] = ("id",)

    @property
    def label(self) -> str:
        """What a person calls the row; empty where its kind has no name."""
        return " ".join(str(getattr(self, key, "")) for key in self.named_by).strip()


def Names(kind: str) -> AfterValidator:  # noqa: N802 - a mark of a field, beside `Field`
    """Mark of a field: its text, texts or keys are ids of rows of this kind, wherever those are known."""

    def check(value: Any, info: ValidationInfo) -> Any:
        known = (info.context or {}).get(kind)
        for one in [value] if isinstance(value, str) else value:
            if known is not None and one not in known:
                allowed = ", ".join(sorted(known)[:_MOST_ALLOWED]) or "none"
                raise ValueError(f"names {one!r}, which does not exist; known are {allowed}")
        return value

    return AfterValidator(check)


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    def check(text: str) -> str:
        if text:
            parse(text)  # the errors of `packaging` are errors of a value, which pydantic reports with their row
        return text

    return AfterValidator(check)


Text = Annotated[str, Field(min_length=1)]
VersionText = Annotated[str, _parsed_by(Version)]
VersionRange = Annotated[str, _parsed_by(SpecifierSet)]
RequirementText = Annotated[str, _parsed_by(Requirement)]


def matrix_folder() -> Path:
    """Where the matrix lies: beside the package in a checkout, inside it where it is installed."""
    beside = PACKAGE_ROOT.parent / "matrix"
    return beside if beside.is_dir() else PACKAGE_ROOT / "matrix"


def read_rows(
    folder: Path, models: Mapping[str, type[BaseModel]], known: Mapping[str, Collection[str]] | None = None
) -> tuple[Any, ...]:
    """Some files as typed values, in their order.

    Args:
        folder: of the matrix.
        models: name of a file -> model of the whole file. The rows of a table are of the kind of the table's name.
        known: kind -> ids of rows that lie in other files.

    Raises:
        MatrixInvalid: with every fault of every file.
    """
    faults: list[str] = []
    loaded = {name: data for name in models if (data := _load(folder / name, faults)) is not None}
    ids: dict[str, Collection[str]] = {}
    for kind, rows in (table for data in loaded.values() for table in data.items() if isinstance(table[1], list)):
        ids[kind] = [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
    ids |= known or {}
    files = [_validate(name, data, models[name], ids, faults) for name, data in loaded.items()]
    if faults:
        raise MatrixInvalid(dict.fromkeys(faults))
    return tuple(files)


def _load(path: Path, faults: list[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as fault:
        faults.append(f"{path.name}: cannot be read: {fault}")
        return None


def _validate(
    name: str, data: dict[str, Any], model: type[BaseModel], ids: Mapping[str, Collection[str]], faults: list[str]
) -> Any:
    """A file as its model, whose rows of one kind have different names."""
    try:
        file = model.model_validate(data, context=ids)
    except ValidationError as invalid:
        for error in invalid.errors():
            where = ".".join(map(str, error["loc"])) + _name_row(data, error["loc"])
            faults.append(f"{name}: {where}: {error['msg']} (found {error['input']!r:.60})")
        return None
    for kind, rows in file:
        labels = Counter(row.label for row in rows if isinstance(row, Row)) if isinstance(rows, list) else Counter()
        faults += [f"{name}: {kind} {one!r} appears {labels[one]} times" for one in labels if one and labels[one] > 1]
    return file


def _name_row(data: Any, location: tuple[int | str, ...]) -> str:
    """The id, or the target, of the row that an error lies in, so that a person need not count rows."""
    for part in location[:2]:  # table, row
        data = data[int(part)] if isinstance(data, list) else data.get(part) if isinstance(data, dict) else None
    name = data.get("id", data.get("target")) if isinstance(data, dict) else None
    return f" ({name})" if isinstance(name, str) else ""
