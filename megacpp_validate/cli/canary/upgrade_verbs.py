"""The verb that judges receipts made earlier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import Format, FormatOption, MatrixOption, OutputOption, app


@app.command()
def compare_receipts(
    before: Annotated[Path, typer.Argument(help="Folder of receipts of the stack in use.")],
    after: Annotated[list[Path], typer.Argument(help="Folders of receipts to judge, each beside the one before it.")],
    verbose: Annotated[bool, typer.Option("--verbose", help="List what did not change too.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Who is to blame for the steps between folders of receipts? Runs nothing: they may be of another machine."""
    from .canary_telling import Telling
    from .upgrade_compare import compare_folders

    compare_folders(read_catalog(matrix), (before, *after), matrix, Telling(fmt, output, verbose))
