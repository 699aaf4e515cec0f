"""Values that every host result is made of: frozen models, a source line, the class of a cause."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import TOOL
from ..errors import Exit, exit_for


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


class Result(Frozen):
    """What a verb answers.

    Attributes:
        tool: the release of this project that made it.
    """

    tool: str = TOOL

    @property
    def breaks(self) -> bool:
        """Whether a breakage was found."""
        return False

    @property
    def lacks(self) -> bool:
        """Whether evidence is missing."""
        return False

    @property
    def exit(self) -> Exit:
        """A breakage before evidence that is missing."""
        return exit_for(breaks=self.breaks, lacks=self.lacks)


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


def list_errors(fault: ValidationError) -> str:
    """What pydantic found, each error with its place; the first five."""
    errors = fault.errors()[:5]
    return "; ".join(f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in errors)
