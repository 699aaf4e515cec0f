"""`lock`: pins and locks."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from .. import TOOL
from .app import Result, verb, write_error_line
from .options import Matrix


@verb("images:describe_lock", verbose="List every need of every stack.")
def lock(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Images whose locks are made; all, and pins, without.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare them with the matrix; write nothing, ask no index.")
    ] = False,
    only: Annotated[
        Literal["pins", "locks", ""], typer.Option(help="Digests of bases, or packages, alone.", show_default=False)
    ] = "",
    accept: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Tag whose digest may change; repeated.")
    ] = None,
    upgrade: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A package to take anew; all for all.")
    ] = None,
    matrix: Matrix = None,
) -> Result:
    """Write containers/pins.json and containers/locks: digests from registries, packages with hashes from the index.

    Exit code 0: they are what the matrix says, 1: a tag is another image now, a locked version has other files, or does
    not fit, or an unverified pin is not what the matrix claims, or (--check) a file is older than the matrix or was
    edited by hand, 2: the matrix, the file of pins or an argument is wrong, 5: uv is missing, or finds no solution, 6:
    the index does not answer, a base has no digest because no registry answered, or the disk is full.
    """
    from ..images.locking import LockOptions, run_lock
    from ..images.plan import ImageRows

    every = tuple("*" if name == "all" else name for name in upgrade or ())
    options = LockOptions(tuple(targets or ()), check, only, frozenset(accept or ()), every)
    return run_lock(ImageRows(matrix, TOOL, os.environ), options, write_error_line)
