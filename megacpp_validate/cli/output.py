"""Where a result goes: standard output or a file, whole, with a reason where it cannot be written."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from ..errors import Exit, InfrastructureFailed, ToolError, WrongArguments
from ..evidence.whole_file import write_whole
from .app import Format

if TYPE_CHECKING:
    from ..report.document import Document


class Result(Protocol):
    """What a verb writes and exits with."""

    @property
    def exit(self) -> Exit:
        """The exit code that the result asks for."""


_R = TypeVar("_R", bound=Result)


def finish(
    result: _R, describe: Callable[[_R], Document], fmt: Format, output: Path | None, *, verbose: bool = False
) -> NoReturn:
    """Write a result and exit with its code.

    Args:
        describe: the result in words; not called for JSON.
        output: the file; standard output without one.
        verbose: show what is folded, in a table.

    Raises:
        SystemExit: always.
    """
    write_result(result, describe, fmt, output, verbose=verbose)
    raise SystemExit(int(result.exit))


def write_result(
    result: _R, describe: Callable[[_R], Document], fmt: Format, output: Path | None, *, verbose: bool = False
) -> None:
    """Write a result in a format to standard output or a file; a reader that stops half way changes no exit code.

    Raises:
        ToolError: it cannot be written.
    """
    write_text(_render(result, describe, fmt, output, verbose=verbose), output)


def _render(result: _R, describe: Callable[[_R], Document], fmt: Format, output: Path | None, *, verbose: bool) -> str:
    name = "terminal" if fmt is Format.TABLE else fmt.value
    render = getattr(import_module(f"megacpp_validate.report.render.{name}"), f"render_{name}")
    if fmt is Format.TABLE:
        render = partial(render, verbose=verbose, stream=sys.stdout if output is None else None)
    text: str = render(result if fmt is Format.JSON else describe(result))
    return text


def write_text(text: str, output: Path | None) -> None:
    """Write text whole to standard output or a file.

    Raises:
        InfrastructureFailed: standard output is closed, or a disk is full.
        WrongArguments: the file cannot be written.
    """
    if output is None:
        if sys.stdout is None:
            raise InfrastructureFailed(
                "the result cannot be written: standard output is closed. Next step: give --output a file; for the "
                "exit code alone send the output to /dev/null."
            )
        try:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
            sys.stdout.flush()
        except OSError as fault:
            # Python flushes what is left at the end, and would end with 120 if that failed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(fault, BrokenPipeError):
                raise _explain("standard output", fault) from fault
        return
    place = output.resolve()  # through a link the file that it names
    try:
        if place.exists() and not place.is_file():  # a pipe or a device is written as it is
            place.write_text(text, encoding="utf-8")
        else:
            write_whole(place, text)
    except OSError as fault:
        raise _explain(str(output), fault) from fault


def require_output(output: Path | None) -> None:
    """Refuse a file that cannot be written, before anything runs.

    Raises:
        WrongArguments: the file cannot be written.
    """
    if output is None or (output.exists() and not output.is_file() and not output.is_dir()):
        return  # a pipe or a device is left to whoever writes
    place = output.resolve()
    if place.is_dir():
        raise _explain(str(output), IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    try:
        with tempfile.TemporaryFile(dir=next(path for path in place.parents if path.exists())):
            pass  # permissions alone do not say: root can write nothing to /proc
    except OSError as fault:
        raise _explain(str(output), fault) from fault


def require_apart(folder: Path, file: Path | None, option: str) -> None:
    """Refuse a file to write among the files that are read: it could replace one.

    Raises:
        WrongArguments: the file lies in the folder.
    """
    if file is not None and Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)):
        raise WrongArguments(
            f"{file} lies in the folder {folder}, which is read: it could replace one of its files. Next step: give "
            f"{option} a file elsewhere."
        )


def _explain(place: str, fault: OSError) -> ToolError:
    reason = fault.strerror or str(fault)
    if fault.errno in (errno.ENOSPC, errno.EDQUOT) or place == "standard output":
        return InfrastructureFailed(
            f"the result cannot be written to {place}: {reason}. A file that was there before is unchanged. Likely "
            "cause: the disk is full. Next step: make room and run the command again, or give another --output."
        )
    return WrongArguments(
        f"the result cannot be written to {place}: {reason}. Likely cause: it is a folder, or you may not write there. "
        "Next step: give --output a file in a folder that you can write."
    )
