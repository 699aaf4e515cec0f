"""What every verb shares: the application, its options, and how an error ends it."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from .. import TOOL
from ..errors import Exit, ToolError
from ..text import clean
from .interrupts import ended_by_signals

LARGEST_SEED: Final = 2**63 - 1  # torch and JSON hold 64 bits, and a verb counts on from the seed that it is given
_AS_JSON: Final = "megacpp-as-json"  # name of the handler of characters that a terminal's encoding lacks

EXIT_CODES: Final = (
    "Exit codes: 0 open, nothing breaks; 1 closed by a breakage; 2 wrong matrix or arguments; 3 nothing selected; 4 "
    "evidence missing; 5 no sources or environment; 6 infrastructure, or a fault of this tool; 130 interrupted."
)


class Format(StrEnum):
    """The form of a result."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    GITHUB = "github"


def _check_output(output: Path | None) -> Path | None:
    from .output import require_output

    require_output(output)
    return output


FormatOption = Annotated[Format, typer.Option("--format", help="Form of the result.")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", help="Write the result to this file.", callback=_check_output)
]
MatrixOption = Annotated[Path | None, typer.Option("--matrix", help="Folder of the matrix files.")]
ReceiptsOption = Annotated[Path, typer.Option("--receipts", help="Folder for the receipts and logs.")]
SeedOption = Annotated[
    int, typer.Option(min=0, max=LARGEST_SEED, help="Of weights and inputs; the same seed gives the same numbers.")
]
PythonOption = Annotated[str, typer.Option(help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="List every check with its bounds.")]


class _Verbs(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb by its name; its help ends with the exit codes."""
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
    rich_markup_mode=None,
    help="Which part of the bridge to Transformer Engine does an upgrade break, and why.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(TOOL)
        raise typer.Exit


@app.callback()
def _take_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def name_verb(command: typer.models.CommandInfo) -> str:
    """The name under which a registered command is called."""
    return command.name or str(getattr(command.callback, "__name__", "")).replace("_", "-")


def main() -> None:
    """Run the command line; an error becomes one message and the exit code of its class.

    An error that no code expects is a fault of this tool: Python would end with 1, which says that a release broke.
    """
    spell_out_characters()
    try:
        with ended_by_signals():  # docker stop, scancel and a closed terminal are interrupts too
            app(prog_name="megacpp-validate")
    except ToolError as fault:
        refuse(str(fault), fault.exit)
    except KeyboardInterrupt:
        refuse("interrupted", Exit.INTERRUPTED)
    except Exception as fault:
        if isinstance(fault, OSError):
            refuse_full_disk(Path(os.fsdecode(fault.filename or ".")), fault)
        if type(fault).__name__ == "BrokenProcessPool":  # a worker was killed: seen in a container of 2 GiB
            refuse(
                f"the run stopped: {fault}. Likely cause: this machine or container ran out of memory, and the kernel "
                "ended a worker process. Next step: give it more memory, or use fewer --jobs.",
                Exit.INFRASTRUCTURE,
            )
        write_error_line(traceback.format_exc().rstrip())
        refuse(
            f"unexpected {type(fault).__name__}: {fault}. Likely cause: a fault of this tool; no release is judged. "
            "Next step: report it with the lines above. Receipts that were written stay; the same command continues.",
            Exit.INFRASTRUCTURE,
        )


def spell_out_characters() -> None:
    """Let a terminal of another encoding lose characters, and not the verdict; what is JSON stays JSON."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(_AS_JSON, _spell_out)
        sys.stdout.reconfigure(errors=_AS_JSON)


def _spell_out(fault: UnicodeError) -> tuple[str, int]:
    """Characters as JSON escapes them."""
    if not isinstance(fault, UnicodeEncodeError):
        raise fault
    return json.dumps(fault.object[fault.start : fault.end])[1:-1], fault.end


def write_error_line(line: str) -> None:
    """A line on standard error, which may be closed."""
    if sys.stderr is None:
        return
    try:
        print(clean(line), file=sys.stderr, flush=True)  # noqa: T201 - standard error is where messages go
    except OSError:  # whoever read it is gone; Python would end with 120 where its last flush fails
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def refuse(message: str, code: Exit) -> NoReturn:
    """End with one message on standard error."""
    write_error_line(f"megacpp-validate: {message}")
    raise SystemExit(int(code))


def refuse_full_disk(folder: Path, fault: OSError) -> None:
    """End because a disk is full, where that is why; any other fault is the caller's."""
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        refuse(
            f"the run stopped: {fault}. Likely cause: the disk of {folder} or of the folder for temporary files is "
            "full. Next step: make room and run the same command: it continues with what is missing.",
            Exit.INFRASTRUCTURE,
        )


def split_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Names given with commas, with spaces, or in options of their own."""
    return tuple(name for text in texts for name in text.replace(",", " ").split())
