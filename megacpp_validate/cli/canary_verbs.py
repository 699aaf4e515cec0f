"""The verbs of the upgrade canary that need no GPU: their arguments."""

from __future__ import annotations

from typing import Annotated

import typer

from ..catalog import read_catalog
from .app import Exit, Format, FormatOption, MatrixOption, OutputOption, app, refuse


@app.command()
def te_canary(
    old: Annotated[
        str | None, typer.Argument(help="Release in use, or a folder that holds transformer_engine/.")
    ] = None,
    new: Annotated[str | None, typer.Argument(help="Release to judge, or a folder.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every adjacent pair of releases, as one grid.")] = False,
    first_bad_in: Annotated[str, typer.Option("--first-bad", help="The first release that breaks this module.")] = "",
    listing: Annotated[bool, typer.Option("--list", help="List the releases on the index.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="List harmless changes too.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Which bridge module does the step from OLD to NEW break, and why? Needs no GPU and no install.

    Without arguments: from the pinned release to the newest on the index.
    """
    from .canary_runs import Telling, judge_step, print_releases, walk_releases

    catalog = read_catalog(matrix)
    telling = Telling(fmt, output, verbose)
    if listing:
        print_releases()
    elif every or first_bad_in:
        walk_releases(catalog, (old, new), first_bad_in, telling)
    else:
        judge_step(catalog, (old, new), telling)


@app.command()
def import_firewall(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run; all without one.")] = None,
    install: Annotated[
        str, typer.Option(help="Damage laid-out wheels, or the install of this interpreter (current).")
    ] = "wheels",
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a process may take.")] = 120.0,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Does the bridge stand, and say why, whatever is wrong with an install of Transformer Engine?"""
    from .canary_runs import Telling, run_damaged_installs

    if install not in {"wheels", "current"}:
        refuse(f"--install takes wheels or current, not {install!r}", Exit.WRONG_ARGUMENTS)
    run_damaged_installs(
        read_catalog(matrix),
        cases or (),
        "current" if install == "current" else "wheels",
        jobs=jobs,
        limit_s=limit,
        telling=Telling(fmt, output),
    )
