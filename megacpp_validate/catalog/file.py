"""Files of the matrix as typed values, or every fault of them in words."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import WrongArguments

PACKAGE_ROOT: Final = Path(__file__).parents[1]
# What a search for faults runs into in rows whose shape is wrong.
_UNCHECKED: Final = (AttributeError, TypeError, ValueError, LookupError)


class MatrixInvalid(WrongArguments):
    """One or more files of the matrix are wrong; `faults` names every fault, one a line."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        lines = "\n".join(f"  {fault}" for fault in self.faults)
        super().__init__(f"the matrix has {len(self.faults)} fault(s):\n{lines}\nNext step: correct each line above.")


class Row(BaseModel):
    """A row of the matrix: frozen, and strict about its keys and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @property
    def label(self) -> str:
        """What a person calls the row."""
        return str(getattr(self, "id", ""))


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

File = TypeVar("File", bound=BaseModel)


def matrix_folder() -> Path:
    """Where the matrix lies: beside the package in a checkout, inside it where it is installed."""
    beside = PACKAGE_ROOT.parent / "matrix"
    return beside if beside.is_dir() else PACKAGE_ROOT / "matrix"


def read_matrix_file(
    path: Path, model: type[File], find: Callable[[File], Iterable[Iterable[str]]] = lambda _: ()
) -> File:
    """A file as typed values. Arguments and errors as `read_matrix_files`."""
    (file,) = read_matrix_files(path.parent, {path.name: model}, find)
    read: File = file
    return read


def read_matrix_files(
    folder: Path, models: Mapping[str, type[BaseModel]], find: Callable[..., Iterable[Iterable[str]]]
) -> tuple[Any, ...]:
    """Some files as typed values, in their order.

    Args:
        folder: of the matrix.
        models: name of a file -> model of the whole file.
        find: gets the files, and gives what is wrong between their rows, one search after another. Where a file has a
            wrong shape, each search goes as far as it can; of a file that cannot be read the rows are missing.

    Raises:
        MatrixInvalid: with every fault of every file.
    """
    faults: list[str] = []
    files = [_read(folder / name, model, faults) for name, model in models.items()]
    unchecked: tuple[type[Exception], ...] = _UNCHECKED if faults else ()
    with suppress(*unchecked) if unchecked else nullcontext():
        for found in find(*files):
            with suppress(*unchecked):
                faults.extend(found)
    if faults:
        raise MatrixInvalid(dict.fromkeys(faults))
    return tuple(files)


def _read(path: Path, model: type[BaseModel], faults: list[str]) -> BaseModel:
    data: dict[str, Any] = {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return model.model_validate(data)
    except ValidationError as invalid:
        for error in invalid.errors():
            where = ".".join(str(part) for part in error["loc"])
            row = _name_row(data, error["loc"])
            faults.append(f"{path.name}: {where}{row}: {error['msg']} (found {error['input']!r:.60})")
    except (OSError, ValueError) as fault:
        faults.append(f"{path.name}: cannot be read: {fault}")
    return _take_unchecked(model, data)


def _take_unchecked(model: type[BaseModel], data: Mapping[str, Any]) -> BaseModel:
    """The rows of a file whose shape is wrong, so that a wrong type in one row hides no fault between others."""
    values = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key in data or get_origin(field.annotation) is list:
            values[key] = _take_value(field.annotation, data.get(key))
    return model.model_construct(**values)


def _take_value(kind: Any, value: Any) -> Any:
    if get_origin(kind) is list:
        return [_take_value(get_args(kind)[0], one) for one in value] if isinstance(value, list) else []
    if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
        return _take_unchecked(kind, value)
    return value


def _name_row(data: Any, location: tuple[int | str, ...]) -> str:
    """The id, or the target, of the row that an error lies in, so that a person need not count rows."""
    for part in location:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return ""
        if isinstance(data, dict):
            for key in ("id", "target"):
                if isinstance(data.get(key), str):
                    return f" ({data[key]})"
    return ""


def find_doubles(place: str, rows: Iterable[Any], key: str = "label") -> Iterator[str]:
    """Rows with the same label; `place` is their file and kind: "stacks.toml: stack"."""
    counts = Counter(getattr(row, key, "") for row in rows)
    yield from (f"{place} {name!r} appears {count} times" for name, count in counts.items() if name and count > 1)


def find_dangling(place: str, rows: Iterable[Any], key: str, known: Collection[str]) -> Iterator[str]:
    """Names under a key of some rows that point to nothing.

    Args:
        place: file and kind of the rows: "stacks.toml: stack".
        rows: checked or not.
        key: has a name, or a list of names.
        known: what may be named; where it is empty its file cannot be read, and nothing is found.
    """
    for row in rows:
        value = getattr(row, key, [])
        for name in value if isinstance(value, list) else [value]:
            if known and isinstance(name, str) and name not in known:
                yield f"{place} {getattr(row, 'label', '')}: {key} names {name!r}, which does not exist"


def ids_of(rows: Iterable[Any]) -> list[str]:
    """The ids of some rows; a row without an id is a fault of its own."""
    return [row.id for row in rows if hasattr(row, "id")]
