"""`lock`: pins and locks."""

from typing import Annotated

import typer

from .app import Context, Result, say, verb


@verb("images:describe_lock")
def lock(
    context: Context,
    targets: Annotated[tuple[str, ...], "Images whose locks are made; all, and pins, without."] = (),
    /,
    check: Annotated[bool, "Compare them with the matrix; write nothing, ask no index."] = False,
    accept: Annotated[tuple[str, ...], "A tag whose digest may change; repeated."] = (),
    upgrade: Annotated[tuple[str, ...], typer.Option(metavar="NAME", help="A package to take anew; all for all.")] = (),
) -> Result:
    """Write containers/pins.json and containers/locks: digests from registries, packages with hashes from the index.

    Exit code 0: they are what the matrix says, 1: a tag is another image now, a locked version has other files, or does
    not fit, or an unverified pin is not what the matrix claims, or (--check) a file is older than the matrix or was
    edited by hand, 2: the matrix, the file of pins or an argument is wrong, 5: uv is missing, or finds no solution, 6:
    the index does not answer, a base has no digest because no registry answered, or the disk is full.
    """
    from ..images.locking import LockOptions, run_lock

    every = tuple("*" if name == "all" else name for name in upgrade)
    return run_lock(context.images, LockOptions(targets, check, frozenset(accept), every), say)
