"""The form and the place of results that are not told in every one of `Format`.

An option offers what its verb tells, and no more; where it is to be written is looked at before anything is done.
"""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .app import Exit, Format, refuse


class PlainFormat(StrEnum):
    """For a person, and for a program."""

    TABLE = Format.TABLE
    JSON = Format.JSON


class PageFormat(StrEnum):
    """The same, and as a part of a page."""

    TABLE = Format.TABLE
    JSON = Format.JSON
    MARKDOWN = Format.MARKDOWN


_HELP = "How to tell the result."
PlainFormatOption = Annotated[PlainFormat, typer.Option("--format", help=_HELP)]
PageFormatOption = Annotated[PageFormat, typer.Option("--format", help=_HELP)]


def require_output(output: Path | None) -> None:
    """Refuse a file that cannot be written, before anything runs. What is no plain file is left to whoever writes."""
    if output is None:
        return
    if output.exists() and not output.is_file() and not output.is_dir():
        return
    place = output.resolve()
    nearest = next((path for path in place.parents if path.exists()), place)
    try:
        with tempfile.TemporaryFile(dir=nearest):  # permissions alone do not tell: /proc lets root write nothing
            if not place.is_dir():
                return
        said = "it is a folder"
    except OSError as fault:
        said = fault.strerror or str(fault)
    refuse(
        f"{output} cannot be written: {said}. Likely cause: it is a folder, or lies in a place that is not yours. Next "
        "step: give --output another file; nothing was done.",
        Exit.WRONG_ARGUMENTS,
    )
