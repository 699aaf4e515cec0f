"""`history`: what became of a cell over runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Output, Result, split_names, verb
from .options import Store


@verb("history:describe_history", verbose="Every cell in rows.")
def history(
    store: Store = Path(".megacpp/receipts"),
    cell: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Cells, with * and ?, with commas or repeated; all without it."),
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="Newest rows of a cell; 0: all.")] = 20,  # noqa: ARG001 - for its words
    output: Output = None,
) -> Result:
    """Show each cell over runs: outcomes, commits, stacks, times, and how often it fails without a change.

    The receipts of cells that are named are read whole; without --cell their checks are not read. Exit code 0: shown,
    whatever the outcomes are. 2: there is no such folder. 3: no receipt, or no such cell. 4: nothing of the cells that
    were named can be read.
    """
    from ..evidence.history import read_history
    from .output import require_apart

    require_apart(store, output, "--output")
    return read_history(store, split_names(cell) or None)
