"""`history`: what became of a cell over runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .app import Format, FormatOption, OutputOption, app, split_names


@app.command()
def history(
    store: Annotated[
        Path, typer.Argument(help="Folder of receipts; each folder below it that holds some is a run.")
    ] = Path(".megacpp/receipts"),
    cell: Annotated[
        list[str] | None,
        typer.Option("--cell", metavar="NAME", help="Cells, with * and ?, with commas or repeated; all without it."),
    ] = None,
    last: Annotated[int, typer.Option("--last", min=0, help="Newest rows of each cell that are shown; 0: all.")] = 20,
    verbose: Annotated[bool, typer.Option("--verbose", help="Every cell in rows.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
) -> None:
    """Show each cell over runs: outcomes, commits, stacks, times, and how often it fails without a change.

    The receipts of cells that are named are read whole; without --cell their checks are not read. Exit code 0: shown,
    whatever the outcomes are. 2: there is no such folder. 3: no receipt, or no such cell. 4: nothing of the cells that
    were named can be read.
    """
    from ..evidence.history import read_history
    from ..report.describe.history import describe_history
    from .output import finish, require_apart

    require_apart(store, output, "--output")
    result = read_history(store, None if cell is None else split_names(cell))
    finish(result, partial(describe_history, last=last, verbose=verbose), fmt, output, verbose=verbose)
