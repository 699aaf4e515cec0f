"""The verb of the report: a folder of receipts as pages that work from disk."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import Format, MatrixOption, app
from ..told_options import LogFormat, LogFormatOption


@app.command()
def report(
    store: Annotated[
        Path, typer.Argument(help="Folder of receipts; each folder below it that holds some is a run.")
    ] = Path(".megacpp"),
    output: Annotated[
        Path, typer.Option("--output", help="Folder of the pages; replaced whole if a report wrote it.")
    ] = Path(".megacpp/report"),
    gate: Annotated[
        list[Path] | None, typer.Option("--gate", help="A decision of release-gate in JSON; may be repeated.")
    ] = None,
    fmt: LogFormatOption = LogFormat.TABLE,
    told: Annotated[
        Path | None, typer.Option("--told", help="Write what is told on the terminal to a file instead.")
    ] = None,
    matrix: MatrixOption = None,
) -> None:
    """What do the receipts of a folder show, over releases, targets and runs? Open index.html in the folder it names.

    Exit code 0: the pages are there; they judge nothing, release-gate does. 2: an argument is wrong. 3: there is no
    receipt. 6: they cannot be written.
    """
    from .report_runs import Asked, run_report

    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    run_report(read_catalog(matrix), Asked(store, output, tuple(gate or ()), made_at, matrix), Format(fmt), told)
