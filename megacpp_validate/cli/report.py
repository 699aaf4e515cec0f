"""`report`: receipts as pages."""

from pathlib import Path
from typing import Annotated

import typer

from .app import Context, Result, verb
from .options import Store


@verb("site.pages:describe_site")
def report(
    context: Context,
    store: Store = Path(".megacpp"),
    /,
    folder: Annotated[
        Path, typer.Option("--output", help="Folder of the pages; replaced whole if a report wrote it.")
    ] = Path(".megacpp/report"),
    output: Annotated[Path | None, typer.Option("--summary", help="Write the summary to this file.")] = None,
) -> Result:
    """Write receipts as pages over releases, targets and runs. Open index.html in the folder that it names.

    Exit code 0: the pages are written; they judge nothing, release-gate does.
    """
    from datetime import UTC, datetime

    from ..report.site.build import write_report
    from .output import require_apart

    require_apart(store, output, "--summary")
    require_apart(folder, output, "--summary")
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    return write_report(context.catalog, store, folder, made_at, context.matrix)
