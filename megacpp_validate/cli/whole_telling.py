"""A result told at once, in the form and at the place that was asked for: whole, or not at all."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from ..evidence.findings import Frozen
from ..evidence.whole_file import write_whole
from .app import Exit, Format, refuse


def tell_whole(
    result: Frozen,
    fmt: Format,
    output: Path | None,
    *,
    render: Callable[[Console], None],
    markdown: Callable[[], Sequence[str]],
) -> None:
    """Print a result, or write it to a file; whoever stops reading it half way changes no exit code.

    Args:
        render: draws it on a console.
        markdown: its lines in Markdown.
    """
    match fmt:
        case Format.TABLE:
            text = _draw(render, sys.stdout if output is None else None)
        case Format.JSON:
            text = result.model_dump_json(indent=2) + "\n"
        case Format.MARKDOWN:
            text = "\n".join(markdown()) + "\n"
        case _:
            refuse(f"this is not told as {fmt.value}. Next step: choose table, json or markdown.", Exit.WRONG_ARGUMENTS)
    if output is None:
        refuse_no_output()
    try:
        if output is not None:
            write_file(output, text)
            return
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
    except OSError as fault:
        if output is None:
            drop_output()
        place = output or "standard output"
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            refuse(
                f"{place} cannot be written: {fault.strerror}. Likely cause: the "
                "disk is full. Next step: make room, or give --output a file elsewhere.",
                Exit.INFRASTRUCTURE,
            )
        refuse(
            f"{place} cannot be written: {fault.strerror or fault}. Likely cause: it is a folder, or lies in a place "
            "that is not yours. Next step: give --output another file.",
            Exit.WRONG_ARGUMENTS,
        )


def write_file(output: Path, text: str) -> None:
    """Whole or not at all; a pipe or a device is written as it is, and through a link the file that it names.

    Raises:
        OSError: it cannot be written.
    """
    place = output.resolve()
    if place.exists() and not place.is_file():
        with place.open("w", encoding="utf-8") as stream:
            stream.write(text)
    else:
        write_whole(place, text)


def refuse_no_output() -> None:
    """End where standard output was closed before the start: nothing can be told there."""
    if sys.stdout is None:
        refuse(
            "the result cannot be written: standard output is closed. Likely cause: `>&-`, or a service without one. "
            "Next step: give --output a file; for the exit code alone send the output to /dev/null.",
            Exit.INFRASTRUCTURE,
        )


def drop_output() -> None:
    """Write no more: Python flushes what is left at the end, and would end with 120 if that failed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse_among(folder: Path, file: Path | None, option: str) -> None:
    """End where a file that is to be written would lie among the files that are read, and maybe in place of one."""
    if file is not None and Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)):
        refuse(
            f"{file} lies in the folder {folder}, which is read: it would be among its files the next time, or "
            f"instead of one. Next step: give {option} a file elsewhere.",
            Exit.WRONG_ARGUMENTS,
        )


def _draw(render: Callable[[Console], None], stream: TextIO | None) -> str:
    """As the console at hand would show it: with colours on a terminal alone, in letters where it has no symbols."""
    like = Console(file=stream or io.StringIO())
    buffer = io.BytesIO()
    kept = io.TextIOWrapper(buffer, encoding=like.encoding, errors="replace", newline="")
    render(Console(file=kept, force_terminal=like.is_terminal, width=like.width))
    kept.flush()
    return buffer.getvalue().decode(like.encoding)
