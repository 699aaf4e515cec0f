"""Where a result goes: standard output or a file, whole, with a reason where it cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from ..errors import Exit, InfrastructureFailed, ToolError, WrongArguments
from .app import Answer, Format


def write_answer(
    answer: Any, described: str, *, output: Path | None, as_json: Path | None = None, **options: Any
) -> int:
    """Write what a verb returned, and return the exit code of the verb.

    Args:
        answer: a text, an `Answer`, or a result that `described` describes.
        described: see `app.verb`.
        output: the file; standard output without one.
        as_json: a second file, for the same result as JSON.
        options: of the verb: `fmt`, `verbose`, and what the description takes.

    Raises:
        ToolError: it cannot be written.
    """
    if isinstance(answer, str):
        write_text(answer, output)
        return Exit.OPEN
    answer = answer if isinstance(answer, Answer) else Answer(answer, described)
    if as_json is not None:
        write_result(answer.result, "", as_json, fmt="json")
    write_result(answer.result, answer.described, output, **options)
    return int(answer.result.exit if answer.exit is None else answer.exit)


def write_result(result: Any, described: str, output: Path | None, *, fmt: Format, **options: Any) -> None:
    """Write a result in a format to standard output or a file; a reader that stops half way changes no exit code.

    Raises:
        ToolError: it cannot be written.
    """
    name = "terminal" if fmt == "table" else fmt
    render = getattr(import_module(f"megacpp_validate.report.render.{name}"), f"render_{name}")
    shown = {"verbose": options.get("verbose", False), "stream": None if output else sys.stdout}
    if fmt != "json":
        module, _, function = described.partition(":")
        describe = getattr(
            import_module(f"megacpp_validate.report.{module if '.' in module else f'describe.{module}'}"), function
        )
        result = describe(
            result, **{key: options[key] for key in list(signature(describe).parameters)[1:] if key in options}
        )
    write_text(render(result, **shown) if fmt == "table" else render(result), output)


def write_text(text: str, output: Path | None) -> None:
    """Write text whole to standard output or a file.

    Raises:
        InfrastructureFailed: standard output is closed, or a disk is full.
        WrongArguments: the file cannot be written.
    """
    if output is None and sys.stdout is None:
        raise InfrastructureFailed("standard output is closed, so nobody reads the result. Next step: give --output.")
    try:
        if output is None:
            print(text.removesuffix("\n"), flush=True)  # noqa: T201 - this is where results go
        elif output.exists() and not output.is_file():  # a pipe or a device is written as it is
            output.write_text(text, encoding="utf-8")
        else:
            from ..evidence.receipt import write_whole

            write_whole(output.resolve(), text)  # through a link the file that it names
    except OSError as fault:
        if output is None:  # Python flushes what is left at the end, and would end with 120 if that failed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if output is not None or not isinstance(fault, BrokenPipeError):
            raise _explain(output, fault) from fault


def _explain(output: Path | None, fault: OSError) -> ToolError:
    what = f"the result cannot be written to {output or 'standard output'}: {fault.strerror or fault}"
    if output is None or fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return InfrastructureFailed(
            f"{what}. A file that was there before is unchanged. Likely cause: the disk is full. Next step: make room "
            "and run the command again, or give another --output."
        )
    return WrongArguments(
        f"{what}. Likely cause: it is a folder, or you may not write there. Next step: give --output a file in a "
        "folder that you can write."
    )
