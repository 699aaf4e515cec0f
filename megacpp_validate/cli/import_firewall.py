"""`import-firewall`: whether the bridge can be imported beside damaged installs."""

from typing import Annotated

import typer

from .app import Context, Limit, Result, verb


@verb("canary:describe_firewall")
def import_firewall(
    context: Context,
    only: Annotated[tuple[str, ...], typer.Argument(metavar="[CASE]...", help="Cases to run. Default: all.")] = (),
    /,
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time.")] = 2,
    limit_s: Limit = 120.0,
) -> Result:
    """Can the bridge be imported, and does it say why, whatever is wrong with an install of Transformer Engine?"""
    from ..canary.upgrade import run_firewall_tier

    options = {"only": only, "limit_s": limit_s, "jobs": jobs}
    return run_firewall_tier(context.catalog, context.progress, **options)
