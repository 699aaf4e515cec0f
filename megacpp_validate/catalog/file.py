"""Files of the matrix as typed values, or every fault of them in one error.

A row is a pydantic model. A field that names other rows is marked with `Names`; `read_rows` compares what such fields
hold with the ids that exist.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

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


@dataclass(frozen=True)
class Names:
    """Mark of a field: its text, texts or keys are ids of rows of this kind."""

    kind: str


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
    folder: Path | None,
    models: Mapping[str, type[BaseModel]],
    known: Mapping[str, Collection[str]] | None = None,
    find: Callable[..., Iterable[str]] = lambda *_: (),
) -> tuple[Any, ...]:
    """Some files as typed values, in their order.

    What is wrong between rows is searched for once every file has the right shape.

    Args:
        folder: of the matrix; the project's own where it is None.
        models: name of a file -> model of the whole file. The rows of a table are of the kind of the table's name.
        known: kind -> ids of rows that lie in other files.
        find: gets the files; what else is wrong between their rows.

    Raises:
        MatrixInvalid: with every fault of every file.
    """
    faults: list[str] = []
    root = folder or matrix_folder()
    files = {name: _read(root / name, model, faults) for name, model in models.items()}
    if not faults:
        ids = {kind: ids_of(rows) for file in files.values() for kind, rows in _list_kinds(file)} | dict(known or {})
        for name, file in files.items():
            faults += [f"{name}: {fault}" for fault in _find_between(file, ids)]
        faults += find(*files.values())
    if faults:
        raise MatrixInvalid(dict.fromkeys(faults))
    return tuple(files.values())


def _read(path: Path, model: type[BaseModel], faults: list[str]) -> Any:
    data: dict[str, Any] = {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return model.model_validate(data)
    except ValidationError as invalid:
        for error in invalid.errors():
            where = ".".join(map(str, error["loc"])) + _name_row(data, error["loc"])
            faults.append(f"{path.name}: {where}: {error['msg']} (found {error['input']!r:.60})")
    except (OSError, ValueError) as fault:
        faults.append(f"{path.name}: cannot be read: {fault}")


def _name_row(data: Any, location: tuple[int | str, ...]) -> str:
    """The id, or the target, of the row that an error lies in, so that a person need not count rows."""
    for part in location[:2]:  # table, row
        data = data[int(part)] if isinstance(data, list) else data.get(part) if isinstance(data, dict) else None
    name = data.get("id", data.get("target")) if isinstance(data, dict) else None
    return f" ({name})" if isinstance(name, str) else ""


def _list_kinds(file: BaseModel) -> Iterator[tuple[str, list[Row]]]:
    for name, field in type(file).model_fields.items():
        rows = getattr(file, name)
        rows = rows if isinstance(rows, list) else [rows]
        yield str(field.validation_alias or name), [row for row in rows if isinstance(row, Row)]


def _find_between(file: Row, ids: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Rows of one name, and ids that point to nothing."""
    yield from _find_dangling(file, ids, deep=False)
    for kind, rows in _list_kinds(file):
        for label, number in Counter(row.label for row in rows).items():
            if label and number > 1:
                yield f"{kind} {label!r} appears {number} times"
        for row in rows:
            yield from (f"{kind} {row.label}: {fault}" for fault in _find_dangling(row, ids))


def _find_dangling(row: Row, ids: Mapping[str, Collection[str]], *, deep: bool = True) -> Iterator[str]:
    for key, field in type(row).model_fields.items():
        value = getattr(row, key)
        for mark in field.metadata:
            if not isinstance(mark, Names) or mark.kind not in ids:
                continue
            known = ids[mark.kind]
            for one in [value] if isinstance(value, str) else value:
                if one not in known:
                    allowed = ", ".join(sorted(known)[:_MOST_ALLOWED])
                    yield f"{key} names {one!r}, which does not exist; known are {allowed or 'none'}"
        for nested in value if deep and isinstance(value, list) else ():
            if isinstance(nested, Row):
                yield from (f"{key}: {fault}" for fault in _find_dangling(nested, ids))


def ids_of(rows: Iterable[Any]) -> list[str]:
    """The ids of some rows."""
    return [row.id for row in rows if hasattr(row, "id")]
