"""`support-grid`: stacks by modules, from receipts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app


@app.command()
def support_grid(
    folders: Annotated[list[Path], typer.Argument(help="Folders of receipts.")],
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Show which modules hold in which stack, as receipts show it: a row a stack, a column a module."""
    from ..catalog.bridge import read_catalog
    from ..environments.session_result import read_support
    from ..report.describe.session import describe_support
    from .output import finish

    modules = [module.id for module in read_catalog(matrix).modules]
    finish(read_support(folders, modules), describe_support, fmt, output)
