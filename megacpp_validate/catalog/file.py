"""Files of the matrix as typed values, or every fault of them in words."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import WrongArguments

PACKAGE_ROOT: Final = Path(__file__).parents[1]


class MatrixInvalid(WrongArguments):
    """One or more files of the matrix are wrong; `faults` names every fault, one a line."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        lines = "\n".join(f"  {fault}" for fault in self.faults)
        super().__init__(f"the matrix has {len(self.faults)} fault(s):\n{lines}\nNext step: correct each line above.")


class Row(BaseModel):
    """A row of the matrix: frozen, and strict about its keys and types.

    Attributes:
        named_by: fields by which a row is told from the others of its kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)
    named_by: ClassVar[tuple[str, ...]] = ("id",)

    @property
    def label(self) -> str:
        """What a person calls the row; empty where its kind has no name."""
        return " ".join(str(getattr(self, key, "")) for key in self.named_by).strip()


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

# (file, kind, key) -> what rows of that kind may name under that key.
References = Mapping[tuple[str, str, str], Collection[str]]


def matrix_folder() -> Path:
    """Where the matrix lies: beside the package in a checkout, inside it where it is installed."""
    beside = PACKAGE_ROOT.parent / "matrix"
    return beside if beside.is_dir() else PACKAGE_ROOT / "matrix"


def read_rows(
    folder: Path | None,
    models: Mapping[str, type[BaseModel]],
    references: Callable[..., References] = lambda *_: {},
    find: Callable[..., Iterable[str]] = lambda *_: (),
) -> tuple[Any, ...]:
    """Some files as typed values, in their order.

    What is wrong between rows is searched for once every file has the right shape.

    Args:
        folder: of the matrix; the project's own where it is None.
        models: name of a file -> model of the whole file.
        references: gets the files; what their rows may name.
        find: gets the files; what else is wrong between their rows.

    Raises:
        MatrixInvalid: with every fault of every file.
    """
    faults: list[str] = []
    root = folder or matrix_folder()
    files = {name: _read(root / name, model, faults) for name, model in models.items()}
    if not faults:
        faults += [fault for name, file in files.items() for fault in _find_doubles(name, file)]
        faults += _find_dangling(files, references(*files.values()))
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


def refuse_doubles(names: Iterable[str]) -> None:
    """Raises `ValueError` where a name appears twice."""
    if wrong := [f"{name!r} appears {number} times" for name, number in Counter(names).items() if number > 1]:
        raise ValueError("; ".join(wrong))


def _list_kinds(file: BaseModel) -> Iterator[tuple[str, list[Any]]]:
    for name, field in type(file).model_fields.items():
        rows = getattr(file, name)
        yield str(field.validation_alias or name), rows if isinstance(rows, list) else [rows]


def _find_doubles(name: str, file: BaseModel) -> Iterator[str]:
    for kind, rows in _list_kinds(file):
        for label, number in Counter(row.label for row in rows if isinstance(row, Row)).items():
            if label and number > 1:
                yield f"{name}: {kind} {label!r} appears {number} times"


def _find_dangling(files: Mapping[str, BaseModel], references: References) -> Iterator[str]:
    for (name, kind, key), known in references.items():
        for row in dict(_list_kinds(files[name]))[kind]:
            value = getattr(row, key, [])
            for one in value if isinstance(value, list) else [value]:
                if one not in known:
                    yield f"{name}: {kind} {row.label}: {key} names {one!r}, which does not exist"


def ids_of(rows: Iterable[Any]) -> list[str]:
    """The ids of some rows."""
    return [row.id for row in rows]
