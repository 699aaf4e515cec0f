"""What every verb shares: the application, the options of a result, and the exit code of each error."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, NoReturn, Protocol, TypeVar

import typer
from typer.core import TyperGroup

from .. import TOOL
from ..errors import Exit, NothingSelected, ToolError
from ..text import clean

_AS_JSON: Final = "megacpp-as-json"  # name of the handler of characters that a terminal's encoding lacks
_Run = TypeVar("_Run", bound=Callable[..., Any])

EXIT_CODES: Final = (
    "Exit codes: 0 open, nothing breaks; 1 closed by a breakage, or by a risk with --fail-on risk; 2 wrong matrix or "
    "arguments; 3 nothing selected; 4 evidence missing; 5 no sources or environment; 6 infrastructure, or a fault of "
    "this tool; 130 interrupted."
)


class Format(StrEnum):
    """The form of a result."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    GITHUB = "github"
    SARIF = "sarif"


class Result(Protocol):
    """What a verb returns: a value of the room that the verb calls."""

    @property
    def exit(self) -> Exit:
        """The exit code of the verb."""


class Answer(NamedTuple):
    """A result that a verb returns where not every result of the verb has the same description.

    Attributes:
        described: module and function of `report.describe`, as in `verb`.
        exit: the exit code where an option of the verb closes what the result leaves open.
    """

    result: Result
    described: str
    exit: Exit | None = None


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


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(TOOL)
        raise typer.Exit


@app.callback()
def _take_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _check_output(output: Path | None) -> Path | None:
    from .output import require_output

    require_output(output)
    return output


Output = Annotated[Path | None, typer.Option(help="Write the result to this file.", callback=_check_output)]
_AsJson = Annotated[
    Path | None, typer.Option("--json", hidden=True)
]  # the entry point of an image keeps a result by it
FormatOption = Annotated[Format, typer.Option("--format", help="Form of the result.")]


def verb(described: str = "", *, verbose: str = "", alias: str = "") -> Callable[[_Run], _Run]:
    """Register a function as the verb of its name, with --format, --output and --verbose beside its own options.

    What the function returns is written, and the verb exits with its exit code. A text is written as it is, and None
    writes nothing; both exit with 0. A function that has parameters `fmt`, `output` or `verbose` gets these, too.

    Args:
        described: MODULE:FUNCTION of `report.describe` that describes the result; without it the verb has no --format.
            That function gets those options of the verb that it has parameters for.
        verbose: help of --verbose; without it the verb has no such option.
        alias: an earlier name of the verb, which help does not list.
    """
    common: dict[str, tuple[Any, Any]] = {"output": (Output, None)}
    if described:
        common["fmt"] = (FormatOption, Format.TABLE)
        common["as_json"] = (_AsJson, None)
    if verbose:
        common["verbose"] = (Annotated[bool, typer.Option("--verbose", help=verbose)], False)

    def register(run: _Run) -> _Run:
        """Register the function under its name, with the options of a result."""
        own = signature(run, eval_str=True).parameters
        parameters = [*own.values()]
        for name, (annotation, default) in common.items():
            if name not in own:
                parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

        def call(**options: Any) -> None:
            answer = run(**{name: value for name, value in options.items() if name in own})
            if answer is not None:
                from .output import write_answer

                raise SystemExit(write_answer(answer, described, **options))

        call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        call.__doc__ = run.__doc__
        app.command(run.__name__.replace("_", "-"))(call)
        if alias:
            app.command(alias, hidden=True)(call)
        return run

    return register


def main() -> None:
    """Run the command line; an error becomes one message and the exit code of its class.

    An error that no code expects is a fault of this tool: Python would end with 1, the code of a breakage.
    """
    spell_out_characters()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():  # docker stop, scancel and a closed terminal are interrupts too
        if handler is not signal.SIG_IGN:  # with nohup, SIGHUP stays ignored
            signal.signal(number, _interrupt)
    try:
        app(prog_name="megacpp-validate")
    except ToolError as fault:
        refuse(str(fault), fault.exit)
    except KeyboardInterrupt:
        refuse("interrupted", Exit.INTERRUPTED)
    except Exception as fault:
        refuse(_explain(fault), Exit.INFRASTRUCTURE)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> NoReturn:
    """End as an interrupt does, once: a terminal that closes sends both signals."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _explain(fault: Exception) -> str:
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the run stopped: {fault}. Likely cause: the disk of {os.fsdecode(fault.filename or '.')} or of the "
            "folder for temporary files is full. Next step: make room and run the same command: the run continues with "
            "what is missing."
        )
    if type(fault).__name__ == "BrokenProcessPool":  # a worker was killed: seen in a container of 2 GiB
        return (
            f"the run stopped: {fault}. Likely cause: this machine or container ran out of memory, and the kernel "
            "ended a worker process. Next step: give it more memory, or use fewer --jobs."
        )
    write_error_line(traceback.format_exc().rstrip())
    return (
        f"unexpected {type(fault).__name__}: {fault}. Likely cause: a fault of this tool; no release is judged. Next "
        "step: report it with the lines above. Receipts that were written stay; the same command continues."
    )


def spell_out_characters() -> None:
    """Write characters that the encoding of the terminal lacks as JSON escapes: a result in JSON stays JSON."""

    def escape(fault: UnicodeError) -> tuple[str, int]:
        if not isinstance(fault, UnicodeEncodeError):
            raise fault
        return json.dumps(fault.object[fault.start : fault.end])[1:-1], fault.end

    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(_AS_JSON, escape)
        sys.stdout.reconfigure(errors=_AS_JSON)


def write_error_line(line: str) -> None:
    """A line on standard error, which may be closed."""
    if sys.stderr is None:
        return
    try:
        print(clean(line), file=sys.stderr, flush=True)  # noqa: T201 - standard error is where messages go
    except OSError:  # its reader is gone; Python would end with 120 where its last flush fails
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def refuse(message: str, code: Exit) -> NoReturn:
    """End with one message on standard error."""
    write_error_line(f"megacpp-validate: {message}")
    raise SystemExit(int(code))


def split_names(texts: Iterable[str] | None) -> tuple[str, ...]:
    """Names given with commas, with spaces, or in options of their own; none where the option is absent.

    Raises:
        NothingSelected: the option is there, and holds no name.
    """
    names = tuple(name for text in texts or () for name in text.replace(",", " ").split())
    if texts is not None and not names:
        raise NothingSelected("nothing is selected: a list of names is empty. Next step: give a name, or leave it out.")
    return names
