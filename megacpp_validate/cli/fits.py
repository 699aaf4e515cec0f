"""`fits`: does a release of Transformer Engine fit a stack."""

from typing import Annotated

import typer

from .app import Context, Result, verb


@verb("images:describe_fits")
def fits(
    context: Context,
    te: Annotated[str | None, typer.Argument(metavar="RELEASE", help="Without it, of each image.")] = None,
    parts: Annotated[
        tuple[str, ...], typer.Argument(metavar="PART=VERSION...", help="cublas=13.1.0.3 cudnn=9.19 torch=2.11.0 ...")
    ] = (),
    /,
    target: Annotated[str, "A row of matrix/targets.toml; without, all."] = "",
) -> Result:
    """Does a release of Transformer Engine fit a stack? Judged from the rows of the matrix; nothing is installed.

    Exit code 0: it fits, 1: something does not, 2: the matrix or an argument is wrong, 4: nothing is refused, and
    something is unknown.
    """
    from ..images.plan import run_fits

    return run_fits(context.images, te, parts, target)
