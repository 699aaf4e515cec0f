"""`lock`: pins and locks."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from .. import TOOL
from .app import Format, FormatOption, MatrixOption, OutputOption, app


class Half(StrEnum):
    """What is made or checked."""

    PINS = "pins"
    LOCKS = "locks"


@app.command()
def lock(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Images whose locks are made; all, and pins, without.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare them with the matrix; write nothing, ask no index.")
    ] = False,
    only: Annotated[Half | None, typer.Option("--only", help="Digests of bases, or packages, alone.")] = None,
    accept: Annotated[
        list[str] | None, typer.Option("--accept", metavar="TAG", help="A tag that may be another image now; repeated.")
    ] = None,
    upgrade: Annotated[
        list[str] | None, typer.Option("--upgrade", metavar="NAME", help="A package to take anew; all for all.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="List every need of every stack.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Write containers/pins.json and containers/locks: digests from registries, packages with hashes from the index.

    Exit code 0: they are what the matrix says, 1: a tag is another image now, a locked version has other files, or does
    not fit, or an unverified pin is not what the matrix claims, or (--check) a file is older than the matrix or was
    edited by hand, 2: the matrix, the file of pins or an argument is wrong, 5: uv is missing, or finds no solution, 6:
    the index does not answer, a base has no digest because no registry answered, or the disk is full.
    """
    from ..images.locking import LockOptions, run_lock
    from ..images.plan import ImageRows
    from ..report.describe.images import describe_lock
    from .output import finish

    options = LockOptions(
        targets=tuple(targets or ()),
        check=check,
        only=only.value if only else "",
        accept=frozenset(accept or ()),
        upgrade=tuple("*" if name == "all" else name for name in upgrade or ()),
    )
    result = run_lock(ImageRows(matrix, TOOL, os.environ), options, lambda line: typer.echo(line, err=True))
    finish(result, describe_lock, fmt, output, verbose=verbose)
