"""The verb that judges receipts made earlier."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Format, FormatOption, MatrixOption, OutputOption, app
from .output import finish


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
    from ..canary.upgrade import compare_receipts as compare
    from ..catalog.bridge import read_catalog
    from ..report.describe.upgrade import describe_upgrade

    result = compare(read_catalog(matrix), (before, *after), matrix, tool=TOOL)
    finish(result, partial(describe_upgrade, verbose=verbose), fmt, output, verbose=verbose)
