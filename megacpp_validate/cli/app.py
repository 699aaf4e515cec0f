"""What every verb shares: exit codes, options, and how a foreseen error ends."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from .. import __version__
from ..catalog.bridge import MatrixInvalid
from .interrupts import ended_by_signals

_AS_JSON: Final = "megacpp-as-json"  # name of the handler of signs that a terminal has not
# What moves the cursor, colours, rings or turns text around; a message may have lines of its own.
_STEERS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
TOOL = f"megacpp-validate {__version__}"


class Exit(IntEnum):
    """Exit codes by class of outcome."""

    OPEN = 0
    CLOSED = 1
    WRONG_ARGUMENTS = 2
    NOTHING_SELECTED = 3
    EVIDENCE_MISSING = 4
    NO_ENVIRONMENT = 5
    INFRASTRUCTURE = 6
    INTERRUPTED = 130


class Format(StrEnum):
    """How a result is told."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"
    JUNIT = "junit"
    GITHUB = "github"
    MARKDOWN = "markdown"


FormatOption = Annotated[Format, typer.Option("--format", help="How to tell the result.")]


def _look(output: Path | None) -> Path | None:
    """What cannot be written is told before anything runs, and not after it."""
    from .output import require_output  # which needs what stands below

    require_output(output)
    return output


OutputOption = Annotated[Path | None, typer.Option("--output", help="Write it to a file instead.", callback=_look)]
MatrixOption = Annotated[Path | None, typer.Option("--matrix", help="Folder of the matrix files.")]

EXIT_CODES: Final = (
    "Exit codes: 0 open, nothing breaks; 1 closed by a breakage; 2 wrong matrix or arguments; 3 nothing selected; 4 "
    "evidence missing; 5 no sources or environment; 6 infrastructure, or a fault of this tool; 130 interrupted."
)


class _Verbs(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb by its name; beside what its own text says of exit codes, its help says what all of them mean."""
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            found.epilog = EXIT_CODES
        return found


app = typer.Typer(
    cls=_Verbs,
    epilog=EXIT_CODES,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Which part of the bridge to Transformer Engine does an upgrade break, and why.",
)


class _Errors(Console):
    def on_broken_pipe(self) -> None:
        """Say no more and go on: rich would end the process with 1, which says that a release broke."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


errors = _Errors(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; every foreseen error becomes one message and the exit code of its class.

    One that was not foreseen is a fault of this tool: Python would end with 1 then, which says that a release broke.
    """
    spell_out_signs()
    try:
        with ended_by_signals():  # docker stop, scancel and a closed terminal are interrupts too
            app()
    except MatrixInvalid as fault:
        refuse(str(fault), Exit.WRONG_ARGUMENTS)
    except KeyboardInterrupt:
        refuse("interrupted", Exit.INTERRUPTED)
    except BrokenExecutor as fault:
        refuse(
            f"the run was given up: {fault}. Likely cause: the memory of this machine or container ran out, and the "
            "kernel ended one of its processes. Next step: give it more memory, or fewer --jobs where the verb has "
            "them; nothing is said of any release.",
            Exit.INFRASTRUCTURE,
        )
    except Exception as fault:
        if isinstance(fault, OSError):
            place = fault.filename if isinstance(fault.filename, str) else tempfile.gettempdir()  # bytes, a descriptor
            refuse_full_disk(Path(place), fault)
        traceback.print_exc()
        refuse(
            f"unforeseen: {type(fault).__name__}: {fault}. Likely cause: a fault of this tool; nothing is said of any "
            "release. Next step: report it with the lines above; receipts that were written stay, and the same "
            "command takes them up again.",
            Exit.INFRASTRUCTURE,
        )


def spell_out_signs() -> None:
    """Let a terminal of another alphabet lose signs, and not the verdict; what is JSON stays JSON."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(_AS_JSON, _spell_out)
        sys.stdout.reconfigure(errors=_AS_JSON)


def _spell_out(fault: UnicodeError) -> tuple[str, int]:
    """Signs as JSON escapes them: Python's own `\\xd7` is none."""
    if not isinstance(fault, UnicodeEncodeError):
        raise fault
    return json.dumps(fault.object[fault.start : fault.end])[1:-1], fault.end


def refuse(message: str, code: Exit) -> NoReturn:
    """End with one message on standard error; what it cites of a receipt steers no terminal."""
    shown = _STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
    errors.print(f"megacpp-validate: {shown}", markup=False)
    raise SystemExit(int(code))


def refuse_full_disk(folder: Path, fault: OSError) -> None:
    """End because a disk is full, where that is why; any other fault is for the caller to tell."""
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        refuse(
            f"the run was given up: {fault}. Likely cause: the disk of {folder} or of the folder for temporary files "
            "is full. Next step: make room and start it again: it runs what is missing.",
            Exit.INFRASTRUCTURE,
        )


def refuse_receipts(folder: Path, fault: OSError) -> NoReturn:
    """End because receipts cannot be written to their folder."""
    refuse_full_disk(folder, fault)
    refuse(
        f"receipts cannot be written to {folder}: {fault.strerror or fault}. Likely cause: it is a file, or lies in a "
        "place that is not yours. Next step: give --receipts a folder that you can write.",
        Exit.WRONG_ARGUMENTS,
    )


def split_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Names given with commas, with spaces, or in options of their own."""
    return tuple(name for text in texts for name in text.replace(",", " ").split())


@contextmanager
def foreseen(codes: Mapping[type[Exception], Exit]) -> Iterator[None]:
    """Errors that a verb foresees, and the exit code of each class."""
    try:
        yield
    except tuple(codes) as fault:
        refuse(str(fault), next(code for kind, code in codes.items() if isinstance(fault, kind)))
