"""`report`: receipts as pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Format, FormatOption, MatrixOption, app


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
    fmt: FormatOption = Format.TABLE,
    told: Annotated[Path | None, typer.Option("--told", help="Write the summary to this file.")] = None,
    matrix: MatrixOption = None,
) -> None:
    """Write receipts as pages over releases, targets and runs. Open index.html in the folder that it names.

    Exit code 0: the pages are written; they judge nothing, release-gate does.
    """
    from datetime import UTC, datetime

    from ..catalog.bridge import read_catalog
    from ..report.describe.site import describe_site
    from ..report.site.build import SiteOptions, write_report
    from ..report.site.folder import require_site
    from .output import finish, require_apart, require_output

    require_output(told)
    require_apart(store, told, "--told")
    require_site(output, [told] if told else [])
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    result = write_report(read_catalog(matrix), SiteOptions(store, output, tuple(gate or ()), made_at, matrix))
    finish(result, describe_site, fmt, told)
