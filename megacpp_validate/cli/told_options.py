"""The form of results that are not told in every one of `Format`: an option offers what its verb tells, and no more."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .app import Format


class PlainFormat(StrEnum):
    """For a person, and for a program."""

    TABLE = Format.TABLE
    JSON = Format.JSON


class PageFormat(StrEnum):
    """The same, and as a part of a page."""

    TABLE = Format.TABLE
    JSON = Format.JSON
    MARKDOWN = Format.MARKDOWN


class LogFormat(StrEnum):
    """Every one but a page."""

    TABLE = Format.TABLE
    JSON = Format.JSON
    JUNIT = Format.JUNIT
    GITHUB = Format.GITHUB
    MARKDOWN = Format.MARKDOWN


_HELP = "How to tell the result."
PlainFormatOption = Annotated[PlainFormat, typer.Option("--format", help=_HELP)]
PageFormatOption = Annotated[PageFormat, typer.Option("--format", help=_HELP)]
LogFormatOption = Annotated[LogFormat, typer.Option("--format", help=_HELP)]
