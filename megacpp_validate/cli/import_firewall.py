"""`import-firewall`: whether the bridge can be imported beside damaged installs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from .. import TOOL
from .app import Result, verb
from .options import Limit, Matrix


@verb("firewall:describe_firewall", verbose="Show every case in full.")
def import_firewall(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run. Default: all.")] = None,
    install: Annotated[
        Literal["wheels", "current"],
        typer.Option(help="Damage laid-out wheels, or the install of this interpreter (current)."),
    ] = "wheels",
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    limit: Limit = 120.0,
    matrix: Matrix = None,
) -> Result:
    """Can the bridge be imported, and does it say why, whatever is wrong with an install of Transformer Engine?"""
    from ..canary.upgrade import run_firewall_tier
    from ..catalog.bridge import read_catalog
    from .progress import Progress

    with Progress() as progress:
        options = {"only": cases or (), "install": install, "limit_s": limit}
        return run_firewall_tier(read_catalog(matrix), progress.callbacks, tool=TOOL, jobs=jobs, **options)
