"""The verb of the firewall tier."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from .. import TOOL
from ..errors import WrongArguments
from .app import Format, FormatOption, MatrixOption, OutputOption, app
from .output import finish


@app.command()
def import_firewall(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run. Default: all.")] = None,
    install: Annotated[
        str, typer.Option(help="Damage laid-out wheels, or the install of this interpreter (current).")
    ] = "wheels",
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which a process without an answer ends.")] = 120.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every case in full.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Can the bridge be imported, and does it say why, whatever is wrong with an install of Transformer Engine?"""
    from ..canary.upgrade import run_firewall_tier
    from ..catalog.bridge import read_catalog
    from ..report.describe.firewall import describe_firewall
    from .progress import ShownProgress

    if install not in {"wheels", "current"}:
        raise WrongArguments(f"--install takes wheels or current, not {install!r}.")
    with ShownProgress() as progress:
        options = {"only": cases or (), "install": install, "limit_s": limit}
        result = run_firewall_tier(read_catalog(matrix), progress.callbacks, tool=TOOL, jobs=jobs, **options)
    finish(result, partial(describe_firewall, verbose=verbose), fmt, output, verbose=verbose)
