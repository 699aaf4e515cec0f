"""One file of the matrix as typed values, or every fault of it in words."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

PACKAGE_ROOT: Final = Path(__file__).parent


class MatrixInvalid(ValueError):
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


def read_matrix_file(path: Path, model: type[File]) -> File:
    """A file as typed values.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    faults: list[str] = []
    read, _ = look_at_matrix_file(path, model, faults)
    if read is None:
        raise MatrixInvalid(faults)
    return read


def look_at_matrix_file(path: Path, model: type[File], faults: list[str]) -> tuple[File | None, dict[str, Any]]:
    """A file as typed values, and as it was written; for readers of several files, which tell the faults of all.

    Args:
        path: of the file.
        model: of the whole file.
        faults: what is wrong is added to them, and the values are None.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
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
    """The id of the row that an error lies in, so that a person need not count rows."""
    for part in location:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return ""
        if isinstance(data, dict) and isinstance(data.get("id"), str):
            return f" ({data['id']})"
    return ""
