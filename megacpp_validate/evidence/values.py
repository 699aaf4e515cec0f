"""Values that every host result is made of: frozen models, a source line, the class of a cause; and JSON read strictly.

A JSON text may hide a key that is there twice, numbers that JSON has not, more than is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import EvidenceMissing


class Cause(StrEnum):
    """The class of cause that blame names."""

    API = "api"
    BINARY = "binary"
    ENVIRONMENT = "environment"
    NUMERICS = "numerics"
    SILENT_FALLBACK = "silent-fallback"
    PERFORMANCE = "performance"
    BOUNDARY = "boundary"  # between modules, each of which holds by itself


class Frozen(BaseModel):
    """A frozen value that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceLine(Frozen):
    """A line of a source file; `file` is relative to the wheel's root, or to the project's."""

    file: str
    line: int = Field(ge=0)


ENVIRONMENT: Final = "environment"  # blamed in place of a module where all of them share the change


def read_version(text: str) -> Version | None:
    """A version; None for a text that is not one."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


class FileInvalid(EvidenceMissing):
    """A file that is not what it should be.

    Attributes:
        file: which one.
        reason: what is wrong with it, every fault named.
    """

    kind: ClassVar[str]
    next_step: ClassVar[str]

    def __init__(self, file: Path, reason: str) -> None:
        self.file = file
        self.reason = reason
        super().__init__(
            f"{file} is not a valid {self.kind}: {reason}. Likely cause: the file was edited, cut short, or written by "
            f"another version. Next step: {self.next_step}."
        )


def read_strict_json(text: str | bytes) -> Any:
    """The value of a JSON text that hides nothing.

    Raises:
        ValueError: it is no JSON, has a key twice in one object, a number that JSON does not have, or is nested deeper
            than Python reads.
    """
    return read_json(text, object_pairs_hook=_once_each, parse_constant=_finite, parse_float=_finite)


def read_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a text, whoever wrote it.

    Args:
        text: JSON.
        hooks: of `json.loads`.

    Raises:
        ValueError: it is no JSON, is refused by a hook, or is nested deeper than Python reads.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError as fault:
        raise ValueError("it is nested too deep") from fault


def _once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} appears twice in one object")
        found[key] = value
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text} is not finite")
    return number


def list_errors(fault: ValidationError) -> str:
    """What pydantic found, each error with its place; the first five."""
    errors = fault.errors()[:5]
    return "; ".join(f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in errors)
