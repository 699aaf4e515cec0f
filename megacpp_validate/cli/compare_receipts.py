"""`compare-receipts`: folders of receipts, judged without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import TOOL
from .app import Result, verb
from .options import Matrix


@verb("upgrade:describe_upgrade", verbose="List what did not change too.")
def compare_receipts(
    before: Annotated[Path, typer.Argument(help="Folder of receipts of the stack in use.")],
    after: Annotated[list[Path], typer.Argument(help="Folders of receipts to judge, each beside the one before it.")],
    matrix: Matrix = None,
) -> Result:
    """Who is to blame for the steps between folders of receipts? Runs nothing: they may be of another machine."""
    from ..canary.upgrade import compare_receipts as compare
    from ..catalog.bridge import read_catalog

    return compare(read_catalog(matrix), (before, *after), matrix, tool=TOOL)
