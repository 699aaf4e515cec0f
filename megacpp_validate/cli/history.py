"""`history`: outcomes of a cell over runs."""

from pathlib import Path
from typing import Annotated

import typer

from .app import Context, Result, verb
from .options import Cells, Store


@verb("receipt:describe_history")
def history(
    context: Context,
    store: Store = Path(".megacpp/receipts"),
    /,
    cell: Cells = (),
    last: Annotated[int, typer.Option(min=0, help="Newest rows of a cell; 0: all.")] = 20,  # noqa: ARG001 - for its words
) -> Result:
    """Show each cell over runs: outcomes, commits, stacks, times, and how often it fails without a change.

    The receipts of cells that are named are read whole; without --cell their checks are not read. Exit code 0: shown,
    whatever the outcomes are. 2: there is no such folder. 3: no receipt, or no such cell. 4: nothing of the cells that
    were named can be read.
    """
    from ..evidence.history import read_history
    from .output import require_apart

    require_apart(store, context.output, "--output")
    return read_history(store, cell or None)
