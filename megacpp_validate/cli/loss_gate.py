"""`loss-gate`: whether each FP8 recipe trained as BF16 did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Format, FormatOption, OutputOption, app


@app.command()
def loss_gate(
    folder: Annotated[Path, typer.Argument(help="Folder of curves, as `fp8` leaves them beside its receipts.")],
    verbose: Annotated[bool, typer.Option("--verbose", help="List every check with its bounds.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
) -> None:
    """Compare the loss of each FP8 recipe with BF16 on the same data and seeds.

    Exit code 0: every recipe follows. 1: one does not. 2: there is no such folder. 4: curves are missing, cannot be
    read, or cannot be compared.
    """
    from ..gate.loss import judge_folder
    from ..report.describe.loss import describe_losses
    from .output import finish

    finish(judge_folder(folder), describe_losses, fmt, output, verbose=verbose)
