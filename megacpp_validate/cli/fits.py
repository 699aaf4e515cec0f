"""`fits`: does a release of Transformer Engine fit a stack."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import TOOL
from .app import Result, verb
from .options import Matrix


@verb("images:describe_fits", verbose="List what fits too.")
def fits(
    te: Annotated[
        str | None, typer.Argument(metavar="RELEASE", help="Of Transformer Engine; of each image without.")
    ] = None,
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="PART=VERSION...", help="cublas=13.1.0.3 cudnn=9.19 torch=2.11.0 ...")
    ] = None,
    target: Annotated[str, typer.Option(help="A row of matrix/targets.toml; without, all.")] = "",
    matrix: Matrix = None,
) -> Result:
    """Does a release of Transformer Engine fit a stack? Judged from the rows of the matrix; nothing is installed.

    Exit code 0: it fits, 1: something does not, 2: the matrix or an argument is wrong, 4: nothing is refused, and
    something is unknown.
    """
    from ..catalog.bridge import read_catalog
    from ..images.fits import run_fits

    return run_fits(read_catalog(matrix), matrix, te, tuple(parts or ()), target, TOOL)
