"""What every verb shares: the application, its options, and the exit code of each error.

The parameters of a verb are its command line: `Annotated[TYPE, HELP]`, before the `/` an argument and after it an
option. HELP is a text, or what typer takes; a third value converts what was given. Options of a room are a dataclass
there, and `fill` takes its fields from the parameters of the same names.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import BoundArguments, Parameter, Signature, signature
from pathlib import Path
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
)

import typer

from ..errors import Exit, NothingSelected, ToolError
from ..text import clean

if TYPE_CHECKING:
    from ..canary import upgrade
    from ..catalog.bridge import Catalog
    from ..environments.fleet import Event
    from ..images.plan import ImageRows

_T = TypeVar("_T")
_Run = TypeVar("_Run", bound=Callable[..., Any])

EXIT_CODES = (
    "Exit codes: 0 open, nothing breaks; 1 closed by a breakage, or by a risk with --fail-on risk; 2 wrong matrix or "
    "arguments; 3 nothing selected; 4 evidence missing; 5 no sources or environment; 6 infrastructure, or a fault of "
    "this tool; 130 interrupted."
)
Format = Literal["table", "json", "html", "markdown", "junit", "github", "sarif"]


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


@dataclass(frozen=True)
class Context:
    """What a verb gets beside its own options.

    Attributes:
        matrix: folder of the matrix files; the project's own without it.
        output: the file for the result; standard output without it.
        fmt: the form of the result.
        seed, limit_s, receipts, python: of a verb that runs probes.
    """

    matrix: Path | None = None
    output: Path | None = None
    fmt: Format = "table"
    verbose: bool = False
    seed: int = 0
    limit_s: float = 0.0
    receipts: Path = Path()
    python: str = ""

    @cached_property
    def catalog(self) -> Catalog:
        """The matrix."""
        from ..catalog.bridge import read_catalog

        return read_catalog(self.matrix)

    @property
    def images(self) -> ImageRows:
        """What the image verbs read of the checkout."""
        from ..images.plan import ImageRows

        return ImageRows(self.catalog, dict(os.environ))

    @property
    def progress(self) -> upgrade.Progress:
        """What the canary calls as its tiers go on: each thing that has ended is a line on standard error."""
        from ..canary import upgrade

        return upgrade.Progress(
            lambda line, done, total: say(f"{done}/{total} {line}"),
            lambda case: say(f"{case.outcome.value:8} {case.case} ({case.seconds:.1f} s)"), show_event, say,
        )  # fmt: skip


def show_event(event: Event) -> None:
    """A line about a cell that has ended, or runs again after an infrastructure fault; a start has no line."""
    order, receipt, count = event.cell.order, event.receipt, f"{event.done}/{event.total}"
    name = f"{order.cell}{', again' if order.only_times else ''}"
    if receipt is not None:
        took = "kept" if event.reused else f"{receipt.seconds.get('total', 0.0):.1f} s"
        say(f"{count:>7} {receipt.outcome.value:12} {name} ({took})")
    elif ": " in event.note:
        say(f"{count:>7} {'again':12} {name}: {event.note}")


app = typer.Typer(
    epilog=EXIT_CODES,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Which part of the bridge to Transformer Engine does an upgrade break, and why. --version prints the version.",
)


Seed = Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Seed of weights and inputs.")]
Limit = Annotated[
    float, typer.Option("--limit", min=1, metavar="SECONDS", help="For a cell, task or import; of ablate: for the run.")
]
Python = Annotated[
    str, typer.Option(metavar="PATH", help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")
]
Receipts = Annotated[Path, typer.Option(metavar="PATH", help="Folder for the receipts and logs.")]
_MATRIX = Annotated[Path | None, typer.Option(metavar="PATH", exists=True, help="Folder of the matrix files.")]
_OUTPUT = Annotated[
    Path | None, typer.Option(metavar="PATH", dir_okay=False, writable=True, help="Write the result to this file.")
]
_FORMAT = Annotated[Format, typer.Option("--format", help="Form of the result.")]
_VERBOSE = Annotated[bool, typer.Option("--verbose", help="List everything: each check, case, change or need.")]
_AS_JSON = Annotated[Path | None, typer.Option("--json", hidden=True)]  # the entry point of an image keeps it


def verb(described: str = "", *, runs: tuple[str, float] | None = None) -> Callable[[_Run], _Run]:
    """Register a function as the verb of its name, with --output, --format and --verbose beside its own options.

    What the function returns is written, and the verb exits with its exit code; a text is written as it is. A
    parameter `context` gets a `Context`, and the verb has --matrix.

    Args:
        described: MODULE:FUNCTION of `report.describe` that describes the result; without it the verb has neither
            --format nor --verbose. That function gets those options of the verb that it has parameters for.
        runs: of a verb that runs probes: the default folder of receipts below .megacpp, and the default limit in
            seconds; it has --receipts, --limit, --seed and --python.
    """
    common: dict[str, tuple[Any, Any]] = {"output": (_OUTPUT, None)}
    if described:
        common |= {"fmt": (_FORMAT, "table"), "verbose": (_VERBOSE, False), "as_json": (_AS_JSON, None)}
    if runs:
        common |= {"receipts": (Receipts, Path(".megacpp", runs[0])), "limit_s": (Limit, runs[1])}
        common |= {"seed": (Seed, 0), "python": (Python, "")}

    def register(run: _Run) -> _Run:
        """Register the function under its name."""
        signed = signature(run, eval_str=True)
        own = [one for one in signed.parameters.values() if one.name != "context"]
        shared = common if len(own) == len(signed.parameters) else {**common, "matrix": (_MATRIX, None)}
        adapted = {one.name: _adapt(one) for one in own}
        listed = [one for one, _ in adapted.values()]
        for name, (annotation, default) in shared.items():
            if name not in adapted:
                listed.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

        def call(**given: Any) -> None:
            given |= {name: convert(given[name]) for name, (_, convert) in adapted.items()}
            context = Context(**{one.name: given[one.name] for one in fields(Context) if one.name in given})
            bound = BoundArguments(signed, {**given, "context": context})
            answer = run(*bound.args, **bound.kwargs)
            if answer is not None:
                from .output import write_answer

                raise SystemExit(write_answer(answer, described, **given))

        call.__signature__ = Signature(listed)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in listed}
        call.__doc__ = run.__doc__
        app.command(run.__name__.replace("_", "-"), epilog=EXIT_CODES)(call)
        return run

    return register


def _adapt(one: Parameter) -> tuple[Parameter, Callable[[Any], Any]]:
    """A parameter of a verb as typer reads it, and what converts its value."""
    kind, about, *converts = get_args(one.annotation)
    default = one.default
    if isinstance(about, str) and one.kind is Parameter.POSITIONAL_ONLY:
        about = typer.Argument(help=about)
    elif isinstance(about, str):
        flag = [f"--{one.name.replace('_', '-')}"] if kind is bool and default is False else []
        about = typer.Option(*flag, help=about)
    if get_origin(kind) is tuple:
        kind = GenericAlias(list, get_args(kind)[:1])
        kind, default = (kind | None, None) if default == () else (kind, default)
        converts = converts or [lambda values: tuple(values or ())]
    annotation = Annotated.__class_getitem__((kind, about))  # type: ignore[attr-defined]
    adapted = one.replace(kind=Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return adapted, converts[0] if converts else lambda value: value


def fill(kind: type[_T], given: Mapping[str, Any], **more: Any) -> _T:
    """The options of a room: a dataclass whose fields are the parameters of a verb, or what its context holds."""
    values = {**vars(given["context"]), **given, **more}
    return kind(**{one.name: values[one.name] for one in fields(kind) if one.name in values})  # type: ignore[arg-type]


def main() -> None:
    """Run the command line; an error becomes one message and the exit code of its class.

    An error that no code expects is a fault of this tool: Python would end with 1, the code of a breakage.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGHUP):  # docker stop, scancel and a closed terminal are interrupts too
        if signal.getsignal(number) is not signal.SIG_IGN:  # with nohup, SIGHUP stays ignored
            signal.signal(number, _interrupt)
    try:
        app(prog_name="megacpp-validate")
    except ToolError as fault:
        _refuse(str(fault), fault.exit)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != Exit.INTERRUPTED:  # typer exits with 130 on an interrupt
            raise
        _refuse("interrupted; what has a receipt is kept", Exit.INTERRUPTED)
    except Exception as fault:
        _refuse(_explain(fault), Exit.INFRASTRUCTURE)


def _interrupt(*_: object) -> NoReturn:
    """End as an interrupt does, once: a terminal that closes sends both signals."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _explain(fault: Exception) -> str:
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
        cause, step = "the disk is full", "make room and run the same command: the run continues with what is missing"
    elif type(fault).__name__ == "BrokenProcessPool":  # a worker was killed: seen in a container of 2 GiB
        cause = "this machine or container ran out of memory, and the kernel ended a worker process"
        step = "give it more memory, or use fewer --jobs"
    else:
        say(traceback.format_exc().rstrip())
        cause = "a fault of this tool; no release is judged"
        step = "report it with the lines above; receipts that were written stay, and the same command continues"
    return f"the run stopped: {type(fault).__name__}: {fault}. Likely cause: {cause}. Next step: {step}."


def say(line: str) -> None:
    """A line on standard error, which may be closed."""
    try:
        print(clean(line), file=sys.stderr, flush=True)  # noqa: T201 - standard error is where messages go
    except OSError:  # its reader is gone; Python would end with 120 where its last flush fails
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _refuse(message: str, code: Exit) -> NoReturn:
    say(f"megacpp-validate: {message}")
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
