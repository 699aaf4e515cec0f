"""`support-grid`: stacks by modules, from receipts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Result, verb
from .options import Matrix


@verb("session:describe_support")
def support_grid(
    folders: Annotated[list[Path], typer.Argument(help="Folders of receipts.")], matrix: Matrix = None
) -> Result:
    """Show which modules hold in which stack, as receipts show it: a row a stack, a column a module."""
    from ..catalog.bridge import read_catalog
    from ..environments.session_result import read_support

    return read_support(folders, [module.id for module in read_catalog(matrix).modules])
