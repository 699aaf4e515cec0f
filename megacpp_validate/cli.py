"""The command line: parses arguments, calls one verb, renders what it gives, and maps the outcome to an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Literal, NoReturn, assert_never

import typer
from rich.console import Console

from . import __version__
from .canary.derive import BridgeUnreadable
from .canary.firewall import run_firewall
from .canary.firewall_plan import UnknownCase
from .canary.release import ReleaseUnreadable
from .canary.sources import Sources, SourceUnavailable, UnknownRelease, nearest
from .canary.sweep import OLDEST, first_bad, is_same_release, read_pair, read_surface, run_pair, run_sweep
from .catalog import Catalog, MatrixInvalid, read_catalog
from .evidence.findings import StaticResult, Sweep
from .evidence.firewall import FirewallResult
from .report import github, html, junit, machine, terminal, terminal_firewall, terminal_sweep

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


FormatOption = Annotated[Format, typer.Option("--format", help="How to tell the result.")]
OutputOption = Annotated[Path | None, typer.Option("--output", help="Write it to a file instead.")]
MatrixOption = Annotated[Path | None, typer.Option("--matrix", help="Folder of the matrix files.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


@app.command()
def te_canary(
    old: Annotated[
        str | None, typer.Argument(help="Release in use, or a folder that holds transformer_engine/.")
    ] = None,
    new: Annotated[str | None, typer.Argument(help="Release to judge, or a folder.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every adjacent pair of releases, as one grid.")] = False,
    first_bad_in: Annotated[str, typer.Option("--first-bad", help="The first release that breaks this module.")] = "",
    listing: Annotated[bool, typer.Option("--list", help="List the releases on the index.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="List harmless changes too.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Which bridge module does the step from OLD to NEW break, and why? Needs no GPU and no install.

    Without arguments: from the pinned release to the newest on the index.
    """
    catalog = read_catalog(matrix)
    sources = Sources()
    if listing:
        sys.stdout.write("\n".join(sources.versions()) + "\n")
        return
    if every or first_bad_in:
        _sweep(catalog, sources, (old, new), first_bad_in, fmt, output, verbose=verbose)
        return
    old, new = _choose(old, new, catalog, sources)
    surface = read_surface(catalog)
    result = run_pair(*read_pair(sources, old, new), surface, tool=TOOL, verbose=verbose)
    _tell(result, fmt, output, verbose=verbose)
    raise typer.Exit(Exit.CLOSED if result.breaks else Exit.OPEN)


@app.command()
def import_firewall(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run; all without one.")] = None,
    install: Annotated[
        str, typer.Option(help="Damage laid-out wheels, or the install of this interpreter (current).")
    ] = "wheels",
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a process may take.")] = 120.0,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Does the bridge stand, and say why, whatever is wrong with an install of Transformer Engine?"""
    if install not in {"wheels", "current"}:
        _refuse(f"--install takes wheels or current, not {install!r}", Exit.WRONG_ARGUMENTS)
    mode: Literal["wheels", "current"] = "current" if install == "current" else "wheels"
    catalog = read_catalog(matrix)
    sources = Sources()
    result = run_firewall(
        catalog.modules,
        lambda distribution, version: sources.wheel(version, distribution),
        tool=TOOL,
        only=cases or (),
        install=mode,
        limit_s=limit,
        jobs=jobs,
        progress=lambda case: errors.print(f"{case.outcome.value:8} {case.case} ({case.seconds:.1f} s)"),
    )
    _tell(result, fmt, output)
    if result.holds:
        return
    failed = any(case.outcome.value == "fail" for case in result.cases)
    raise typer.Exit(Exit.CLOSED if failed else Exit.EVIDENCE_MISSING)


def main() -> None:
    """Run the command line; every foreseen error becomes one message and the exit code of its class."""
    try:
        app()
    except (MatrixInvalid, UnknownRelease, UnknownCase) as fault:
        _refuse(str(fault), Exit.WRONG_ARGUMENTS)
    except (SourceUnavailable, ReleaseUnreadable) as fault:
        _refuse(str(fault), Exit.NO_ENVIRONMENT)
    except BridgeUnreadable as fault:
        _refuse(str(fault), Exit.WRONG_ARGUMENTS)
    except KeyboardInterrupt:
        _refuse("interrupted", Exit.INTERRUPTED)


def _choose(old: str | None, new: str | None, catalog: Catalog, sources: Sources) -> tuple[str, str]:
    """OLD and NEW, from the pin and the index where they are not given."""
    start = catalog.pinned.te if old is None else old
    end = sources.versions()[-1] if new is None else new
    if start == end or is_same_release(start, end):
        if old and new:
            _refuse(
                f"OLD and NEW are both {old}: there is nothing to compare. Next step: give two releases.",
                Exit.WRONG_ARGUMENTS,
            )
        _refuse(
            f"{start} is the newest release on the index: there is no upgrade to judge. Next step: give two releases, "
            "or --all.",
            Exit.NOTHING_SELECTED,
        )
    return start, end


def _sweep(
    catalog: Catalog,
    sources: Sources,
    ends: tuple[str | None, str | None],
    module: str,
    fmt: Format,
    output: Path | None,
    *,
    verbose: bool,
) -> None:
    names = [row.id for row in catalog.modules]
    if module and module not in names:
        _refuse(
            f"there is no bridge module {module!r}. Next step: choose one of {', '.join(names)}.",
            Exit.WRONG_ARGUMENTS,
        )
    versions = _between(sources.versions(), ends)
    sweep = run_sweep(versions, sources, catalog, tool=TOOL, progress=_progress())
    if not sweep.steps:
        _refuse("no two releases could be read: there is nothing to compare", Exit.NOTHING_SELECTED)
    if not module:
        _tell(sweep, fmt, output, verbose=verbose)
        raise typer.Exit(Exit.OPEN)  # the grid is history: it closes nothing
    step = first_bad(sweep, module)
    if step is None:
        if fmt is Format.TABLE and output is None:
            Console().print(f"no release between {versions[0]} and {versions[-1]} breaks {module}")
        else:
            _tell(sweep, fmt, output, verbose=verbose)  # for a program: the steps that show it
        raise typer.Exit(Exit.OPEN)
    if fmt is Format.TABLE and output is None:
        Console().print(
            f"{module} breaks first in [bold]{step.new.version}[/bold] ({step.old.version} is the last good one)\n"
        )
    _tell(step, fmt, output, verbose=verbose)
    raise typer.Exit(Exit.CLOSED)


def _progress() -> Callable[[str], None]:
    """Says which step is done where a person looks on; a log keeps the result only."""
    return (lambda step: errors.print(f"{step:32}", end="\r")) if errors.is_terminal else (lambda _: None)


def _between(versions: list[str], ends: tuple[str | None, str | None]) -> list[str]:
    """The releases from the first to the last of `ends`, the oldest readable one and the newest without."""
    readable = versions[versions.index(OLDEST) :] if OLDEST in versions else versions  # a mirror may start later
    first, last = ends[0] or readable[0], ends[1] or versions[-1]
    for name in (first, last):
        if name not in versions:
            raise UnknownRelease(
                f"there is no Transformer Engine {name} on the index. Nearest: {', '.join(nearest(name, versions))}. "
                "Next step: choose one of them; `--list` shows all."
            )
    one, other = sorted((versions.index(first), versions.index(last)))
    return versions[one : other + 1]


def _tell(
    result: StaticResult | Sweep | FirewallResult, fmt: Format, output: Path | None, *, verbose: bool = False
) -> None:
    if output is None:
        if fmt is Format.TABLE:
            _print_table(result, Console(), verbose=verbose)
        else:
            text = _text(result, fmt)
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w", encoding="utf-8") as stream:
            if fmt is Format.TABLE:
                _print_table(result, Console(file=stream), verbose=verbose)
            else:
                stream.write(_text(result, fmt))
    except OSError as fault:
        _refuse(
            f"{output} cannot be written: {fault.strerror or fault}. Likely cause: it is a folder, or lies in a place "
            "that is not yours. Next step: give --output a file in a folder that you can write.",
            Exit.WRONG_ARGUMENTS,
        )


def _print_table(result: StaticResult | Sweep | FirewallResult, console: Console, *, verbose: bool) -> None:
    match result:
        case StaticResult():
            terminal.render_static(result, verbose=verbose, console=console)
        case Sweep():
            terminal_sweep.render_sweep(result, console=console)
        case FirewallResult():
            terminal_firewall.render_firewall(result, console=console)
        case _:
            assert_never(result)


def _text(result: StaticResult | Sweep | FirewallResult, fmt: Format) -> str:
    match (fmt, result):
        case (Format.HTML, StaticResult()):
            return html.render_static_html(result)
        case (Format.HTML, Sweep()):
            return html.render_sweep_html(result)
        case (Format.HTML, FirewallResult()):
            return html.render_firewall_html(result)
        case (Format.JUNIT, StaticResult()):
            return junit.render_static_junit(result)
        case (Format.JUNIT, Sweep()):
            return junit.render_sweep_junit(result)
        case (Format.JUNIT, FirewallResult()):
            return junit.render_firewall_junit(result)
        case (Format.GITHUB, StaticResult()):
            return github.render_static_annotations(result)
        case (Format.GITHUB, Sweep()):
            return github.render_sweep_annotations(result)
        case (Format.GITHUB, FirewallResult()):
            return github.render_firewall_annotations(result)
    return machine.to_json(result)


def _refuse(message: str, code: Exit) -> NoReturn:
    errors.print(f"megacpp-validate: {message}", markup=False)
    raise SystemExit(int(code))


if __name__ == "__main__":
    main()
