"""Receipts as pages and lists."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import Context, Result, verb
from .options import Cells, Store


@verb("site.pages:describe_site")
def report(
    context: Context,
    store: Store = Path(".megacpp"),
    /,
    folder: Annotated[
        Path, typer.Option("--output", help="Folder of the pages; pages of an earlier report there are replaced.")
    ] = Path(".megacpp/report"),
    output: Annotated[Path | None, typer.Option("--summary", help="Write the summary to this file.")] = None,  # noqa: ARG001
) -> Result:
    """Write receipts as pages over releases, targets and runs. Open index.html in the folder that it names.

    Exit code 0: the pages are written; they judge nothing, release-gate does. 3: no receipt. 4: the pages are written,
    and a file cannot be read.
    """
    from datetime import UTC, datetime

    from ..report.site.build import write_report

    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    return write_report(context.catalog, store, folder, made_at)


@verb("receipt:describe_history")
def history(
    store: Store = Path(".megacpp/receipts"),
    /,
    cell: Cells = (),
    last: Annotated[int, typer.Option(min=0, help="Newest rows of a cell; 0: all.")] = 20,  # noqa: ARG001 - for its words
) -> Result:
    """Show each cell over runs: outcomes, commits, stacks and times.

    The receipts of cells that are named are read whole; without --cell their checks are not read. Exit code 0: shown,
    whatever the outcomes are. 2: there is no such folder. 3: no receipt, or no such cell. 4: nothing of the cells that
    were named can be read.
    """
    from ..evidence.history import read_history

    return read_history(store, cell or None)


@verb()
def schema(form: Annotated[Literal["receipt", "loss-curve"], "The file that it is of."], /) -> str:
    """Print a JSON schema; docs/schema/receipt.json and docs/schema/loss_curve.json hold these texts."""
    import json

    from ..evidence.loss_curve import CURVE_SCHEMA_ID, LossCurve
    from ..evidence.receipt import SCHEMA_ID, Receipt
    from ..evidence.store import json_schema

    forms = {"receipt": (Receipt, SCHEMA_ID), "loss-curve": (LossCurve, CURVE_SCHEMA_ID)}
    return json.dumps(json_schema(*forms[form]), indent=2, ensure_ascii=False)
