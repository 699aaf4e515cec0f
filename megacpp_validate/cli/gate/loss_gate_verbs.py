"""The verbs of the loss gate: judge curves, publish their schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..app import Format, FormatOption, OutputOption, app


@app.command()
def loss_gate(
    folder: Annotated[Path, typer.Argument(help="Folder of curves, as `fp8` leaves them beside its receipts.")],
    verbose: Annotated[bool, typer.Option("--verbose", help="List every check with its bounds.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
) -> None:
    """Did each FP8 recipe train as BF16 did, with the same data and seeds?

    Exit code 0: every recipe follows. 1: one does not. 2: there is no such folder. 4: curves are missing, cannot be
    read, or cannot be compared.
    """
    from .loss_gate_runs import run_loss_gate

    run_loss_gate(folder, fmt, output, verbose=verbose)


@app.command()
def loss_curve_schema() -> None:
    """The JSON schema of a loss curve; docs/schema/loss_curve.json is what this prints."""
    from ...evidence.loss_curve_file import loss_curve_schema as schema

    sys.stdout.write(json.dumps(schema(), indent=2, ensure_ascii=False) + "\n")
