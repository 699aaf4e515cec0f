"""The verbs of pins and locks, and of whether a stack fits."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import MatrixOption, OutputOption, app
from ..told_options import PageFormat, PageFormatOption


class Half(StrEnum):
    """What is looked at."""

    PINS = "pins"
    LOCKS = "locks"


@app.command()
def lock(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Images whose locks are made; all, and pins, without.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say whether they are what the matrix says; write nothing.")
    ] = False,
    only: Annotated[Half | None, typer.Option("--only", help="Digests of bases, or packages, alone.")] = None,
    accept: Annotated[
        list[str] | None, typer.Option("--accept", metavar="TAG", help="A tag that may be another image now; repeated.")
    ] = None,
    upgrade: Annotated[
        list[str] | None, typer.Option("--upgrade", metavar="NAME", help="A package to take anew; all for all.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="List every need of every stack.")] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Write containers/pins.json and containers/locks: digests from registries, packages with hashes from the index.

    Exit code 0: they are what the matrix says, 1: a tag is another image now, a locked version has other files, or does
    not fit, or an unverified pin is not what the matrix claims, or (--check) a file is older than the matrix or was
    edited by hand, 2: the matrix, the file of pins or an argument is wrong, 5: there is no uv, or it finds no solution,
    6: the index does not answer, a base has no digest because no registry did, or the disk is full.
    """
    from .lock_runs import Asked, run_lock

    asked = Asked(
        targets=tuple(targets or ()),
        check=check,
        only=only.value if only else "",
        accept=frozenset(accept or ()),
        upgrade=tuple("*" if name == "all" else name for name in upgrade or ()),
    )
    run_lock(read_catalog(matrix), matrix, asked, fmt, output, verbose=verbose)


@app.command()
def fits(
    te: Annotated[
        str | None, typer.Argument(metavar="RELEASE", help="Of Transformer Engine; of each image without.")
    ] = None,
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="PART=VERSION...", help="cublas=13.1.0.3 cudnn=9.19 torch=2.11.0 ...")
    ] = None,
    target: Annotated[
        str, typer.Option("--target", help="A row of matrix/targets.toml; without, the needs of each.")
    ] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="List what fits too.")] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Does a release of Transformer Engine fit what is there? Asked of the rows of the matrix; nothing is installed.

    Exit code 0: it fits, 1: something does not, 2: the matrix or an argument is wrong, 4: nothing is refused, and not
    everything is known.
    """
    from .fits_runs import run_fits

    run_fits(read_catalog(matrix), matrix, te, tuple(parts or ()), fmt, output, verbose=verbose, target=target)
