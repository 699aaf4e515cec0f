"""`report`: receipts as pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Result, verb
from .options import Matrix, Store


@verb("site:describe_site")
def report(
    store: Store = Path(".megacpp"),
    folder: Annotated[
        Path, typer.Option("--output", help="Folder of the pages; replaced whole if a report wrote it.")
    ] = Path(".megacpp/report"),
    gate: Annotated[
        list[Path] | None, typer.Option(help="A decision of release-gate in JSON; may be repeated.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--summary", help="Write the summary to this file.")] = None,
    matrix: Matrix = None,
) -> Result:
    """Write receipts as pages over releases, targets and runs. Open index.html in the folder that it names.

    Exit code 0: the pages are written; they judge nothing, release-gate does.
    """
    from datetime import UTC, datetime

    from ..catalog.bridge import read_catalog
    from ..report.site.build import SiteOptions, write_report
    from ..report.site.folder import require_site
    from .output import require_apart, require_output

    require_output(output)
    require_apart(store, output, "--summary")
    require_site(folder, [output] if output else [])
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    return write_report(read_catalog(matrix), SiteOptions(store, folder, tuple(gate or ()), made_at, matrix))
