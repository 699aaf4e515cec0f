"""`fp8-policy`: what may run in low precision."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from .app import Result, split_names, verb
from .options import Matrix


@verb("policy:describe_policy")
def fp8_policy(
    preset: Annotated[
        list[str] | None, typer.Option(help="Rows of fp8_presets.toml, with commas or repeated; all without it.")
    ] = None,
    today: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Day on which waivers are checked; default: today.")
    ] = None,
    matrix: Matrix = None,
) -> Result:
    """Decide what may run in low precision, what may not, why, and until when by waiver.

    Exit code 0: presets that are meant to run are let through, and those that were rolled back are refused by the rules
    that must refuse them. 1: one of them is not so. 2: a file of the matrix, or an argument, is wrong.
    """
    from ..gate.fp8_policy import decide_policy

    return decide_policy(matrix, today.date() if today else None, split_names(preset) or None)
