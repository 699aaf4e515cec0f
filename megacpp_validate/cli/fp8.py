"""`fp8`: recipes, ownership, backends and the loss gate on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import (
    Format,
    FormatOption,
    MatrixOption,
    OutputOption,
    PythonOption,
    ReceiptsOption,
    SeedOption,
    VerboseOption,
    app,
    split_names,
)


@app.command()
def fp8(
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml: h200, b200.")] = "h200",
    probes: Annotated[
        list[str] | None, typer.Option("--probes", help="Cells to run, with commas or repeated; all without it.")
    ] = None,
    seed: SeedOption = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Cells at a time; 0: 8 on a GPU, 2 without.")] = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take, training apart.")] = 300.0,
    receipts: ReceiptsOption = Path(".megacpp/fp8"),
    python: PythonOption = "",
    verbose: VerboseOption = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Check FP8 recipes, their state and owners, and whether training in FP8 follows BF16.

    The cells are the rows of matrix/fp8.toml. A recipe that the target lacks must be refused there, which is good.
    """
    from ..catalog.bridge import read_catalog
    from ..environments.host_session import SessionOptions
    from ..gate.fp8_session import run_fp8
    from ..report.describe.session import describe_session
    from .output import finish
    from .progress import CellProgress

    names = None if probes is None else split_names(probes)
    options = SessionOptions(target, names, seed, jobs, limit, receipts, python)
    with CellProgress() as progress:
        result = run_fp8(read_catalog(matrix), matrix, options, progress)
    finish(result, describe_session, fmt, output, verbose=verbose)
