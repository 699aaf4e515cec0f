"""One file of the matrix as typed values, or every fault of it in words."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import WrongArguments

PACKAGE_ROOT: Final = Path(__file__).parents[1]
_UNREADABLE: Final = (AttributeError, TypeError, ValueError, LookupError, RuntimeError)


class MatrixInvalid(WrongArguments, ValueError):
    """One or more files of the matrix are wrong; `faults` names them all, one a line."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        lines = "\n".join(f"  {fault}" for fault in self.faults)
        super().__init__(
            f"the matrix has {len(self.faults)} fault(s):\n{lines}\nNext step: mend each line named above."
        )


class Row(BaseModel):
    """A row of the matrix: frozen, and strict about its keys and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


File = TypeVar("File", bound=BaseModel)


def matrix_folder() -> Path:
    """Where the matrix lies: beside the package in a checkout, inside it where it is installed."""
    beside = PACKAGE_ROOT.parent / "matrix"
    return beside if beside.is_dir() else PACKAGE_ROOT / "matrix"


def read_matrix_file(
    path: Path, model: type[File], look: Callable[[File], Iterable[Iterator[str]]] = lambda _: ()
) -> File:
    """A file as typed values.

    Args:
        path: of the file.
        model: of the whole file.
        look: what is wrong between its rows. Of a file of a wrong shape each of the looks is taken as far as it goes.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    faults: list[str] = []
    read, data = look_at_matrix_file(path, model, faults)
    if read is not None:
        faults += [fault for found in look(read) for fault in found]
    elif data:
        faults += _find_more(look, _take_as_written(model, data))
    if read is None or faults:
        raise MatrixInvalid(dict.fromkeys(faults))
    return read


def _find_more(look: Callable[[File], Iterable[Iterator[str]]], file: File) -> Iterator[str]:
    """Faults between rows that nobody has checked: a look ends at the first that it cannot read."""
    with suppress(*_UNREADABLE):
        for found in look(file):
            with suppress(*_UNREADABLE):
                yield from found


def _take_as_written(model: type[File], data: dict[str, Any]) -> File:
    """The rows of a file whose shape is wrong, unchecked: each key that is there, as it is there."""
    return model.model_construct(
        **{
            field.alias or name: _take_value(field.annotation, data[field.alias or name])
            for name, field in model.model_fields.items()
            if (field.alias or name) in data
        }
    )


def _take_value(kind: Any, value: Any) -> Any:
    inner = get_args(kind)
    if get_origin(kind) is list and isinstance(value, list):
        return [_take_value(inner[0], one) for one in value]
    if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
        return _take_as_written(kind, value)
    return value


def look_at_matrix_file(path: Path, model: type[File], faults: list[str]) -> tuple[File | None, dict[str, Any]]:
    """A file as typed values, and as it was written; for readers of several files, which tell the faults of all.

    Args:
        path: of the file.
        model: of the whole file.
        faults: what is wrong is added to them, and the values are None.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        faults.append(f"{path.name}: cannot be read: {fault}")
        return None, {}
    try:
        return model.model_validate(data), data
    except ValidationError as invalid:
        for error in invalid.errors():
            where = ".".join(str(part) for part in error["loc"])
            named = _named(data, error["loc"])
            faults.append(f"{path.name}: {where}{named}: {error['msg']} (found {error['input']!r:.60})")
        return None, data


def _named(data: Any, location: tuple[int | str, ...]) -> str:
    """The id, or the target, of the row that an error lies in, so that a person need not count rows."""
    for part in location:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return ""
        named = (
            [data[key] for key in ("id", "target") if isinstance(data.get(key), str)] if isinstance(data, dict) else []
        )
        if named:
            return f" ({named[0]})"
    return ""
