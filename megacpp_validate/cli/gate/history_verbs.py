"""The verb of cells over runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..app import OutputOption, app, split_names
from ..told_options import PageFormat, PageFormatOption


@app.command()
def history(
    store: Annotated[
        Path, typer.Argument(help="Folder of receipts; each folder below it that holds some is a run.")
    ] = Path(".megacpp/receipts"),
    cell: Annotated[
        list[str] | None,
        typer.Option("--cell", metavar="NAME", help="Cells, with * and ?, with commas or repeated; all without it."),
    ] = None,
    quantity: Annotated[
        list[str] | None,
        typer.Option("--quantity", metavar="NAME", help="Trends to tell: step_seconds, peak_memory_mib, timing:*, ..."),
    ] = None,
    last: Annotated[int, typer.Option("--last", min=0, help="Newest rows of each cell that are shown; 0: all.")] = 20,
    database: Annotated[
        Path | None, typer.Option("--database", help="File of the index; else one a store in the user's cache.")
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Read every file again, whatever is known.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Every cell in rows, every unreadable file.")] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
) -> None:
    """What became of a cell over runs: outcomes, commits, stacks, times, trends, and how often it goes bad by itself.

    Receipts of the cells that are named are read in full; without --cell their fields alone are read, which takes
    thousands a second. The receipts are the truth: the index of them is made again at any time.

    Exit code 0: told, whatever the outcomes are. 2: there is no such folder. 3: no receipt, or no such cell. 4: of the
    cells that were named nothing can be read.
    """
    from .history_runs import Asked, run_history

    cells = None if cell is None else split_names(cell)
    asked = Asked(store, cells, split_names(quantity or ()), last, database, rebuild)
    run_history(asked, fmt, output, verbose=verbose)
