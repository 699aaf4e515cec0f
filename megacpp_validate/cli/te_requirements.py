"""`te-requirements`: what the core wheels of a release need of NVIDIA's libraries."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import TOOL
from .app import Result, verb
from .options import Matrix


@verb("requirements:describe_requirements")
def te_requirements(
    te: Annotated[str, typer.Argument(metavar="RELEASE", help="Of Transformer Engine.")],
    write: Annotated[bool, typer.Option("--write", help="Add rows to matrix/needs.toml for what no row has.")] = False,
    matrix: Matrix = None,
) -> Result:
    """Which cuBLAS, cuDNN, NCCL and CUDA runtime a release needs: computed from the symbols of the wheels on the index.

    Exit code 0: all wheels were read, 2: the matrix is wrong, 4: a wheel could not be read.
    """
    from ..canary.wheel_requirements import run_requirements
    from ..catalog.bridge import read_catalog
    from .progress import Progress

    with Progress() as progress:
        return run_requirements(read_catalog(matrix), te, matrix, tool=TOOL, write=write, note=progress.say)
