"""`fp8-policy`: what may run in low precision."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app, split_names


@app.command()
def fp8_policy(
    preset: Annotated[
        list[str] | None, typer.Option("--preset", help="Rows of fp8_presets.toml, with commas or repeated.")
    ] = None,
    today: Annotated[
        datetime | None, typer.Option("--today", formats=["%Y-%m-%d"], help="The day of the answer; default: today.")
    ] = None,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Decide what may run in low precision, what may not, why, and until when by waiver.

    Exit code 0: presets that are meant to run are let through, and those that were rolled back are refused by the rules
    that must refuse them. 1: one of them is not so. 2: a file of the matrix, or an argument, is wrong.
    """
    from ..gate.fp8_policy import decide_policy
    from ..report.describe.policy import describe_policy
    from .output import finish

    names = None if preset is None else split_names(preset)
    finish(decide_policy(matrix, today.date() if today else None, names), describe_policy, fmt, output)
