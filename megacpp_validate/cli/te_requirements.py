"""`te-requirements`: what the core wheels of a release need of NVIDIA's libraries."""

from typing import Annotated

import typer

from .app import Context, Result, say, verb


@verb("canary:describe_requirements")
def te_requirements(
    context: Context,
    te: Annotated[str, typer.Argument(metavar="RELEASE", help="Of Transformer Engine.")],
    /,
) -> Result:
    """Which cuBLAS, cuDNN, NCCL and CUDA runtime a release needs: computed from the symbols of the wheels on the index.

    Exit code 0: all wheels were read, 2: the matrix is wrong, 4: a wheel could not be read.
    """
    from ..canary.requirements import run_requirements

    return run_requirements(context.catalog, te, context.matrix, note=say)
