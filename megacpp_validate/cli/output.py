"""Where a result goes: standard output or a file, whole, with a reason where it cannot be written."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ..evidence.whole_file import write_whole
from .app import Exit, refuse


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


def write_told(
    draw: Callable[[Console], None] | None, text: Callable[[], str], output: Path | None, *, option: str = "--output"
) -> None:
    """Draw something on the terminal or into a file, or write its text there.

    Args:
        draw: on a console; None where it is to be the text.
        text: the same as text.
        output: the file; standard output without one.
        option: that names the file.
    """
    if output is None:
        refuse_no_output()
        try:
            if draw is not None:
                draw(_Terminal())
            else:
                said = text()
                sys.stdout.write(said if said.endswith("\n") else said + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            drop_output()
        except OSError as fault:
            drop_output()
            refuse(
                f"the result cannot be written to standard output: {fault.strerror or fault}. Likely cause: the disk "
                "that it is sent to is full. Next step: make room, or give --output a file elsewhere.",
                Exit.INFRASTRUCTURE,
            )
        return
    try:
        write_file(output, _draw_text(draw) if draw is not None else text())
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            refuse(
                f"{output} cannot be written: {fault.strerror}; what was there before is as it was. Likely cause: the "
                f"disk is full. Next step: make room and start it again, or give {option} a file elsewhere.",
                Exit.INFRASTRUCTURE,
            )
        refuse(
            f"{output} cannot be written: {fault.strerror or fault}. Likely cause: it is a folder, or lies in a place "
            f"that is not yours. Next step: give {option} a file in a folder that you can write.",
            Exit.WRONG_ARGUMENTS,
        )


def _draw_text(draw: Callable[[Console], None]) -> str:
    stream = io.StringIO()
    draw(Console(file=stream))
    return stream.getvalue()


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the caller: rich would end the process with 1, which says that something broke."""
        raise BrokenPipeError


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
