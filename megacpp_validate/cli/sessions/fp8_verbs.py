"""The verb of FP8: recipes, ownership, lanes and the loss gate on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..app import Format, FormatOption, MatrixOption, OutputOption, app, split_names
from .session_options import PythonOption, ReceiptsOption, SeedOption, VerboseOption


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
    """Does FP8 do what its label says: recipes, their state, who owns it, and does training under it follow BF16?

    The cells are the rows of matrix/fp8.toml. A recipe that the target lacks must be refused there, which is good.
    """
    from .fp8_runs import run_fp8
    from .session_runs import Asked

    names = None if probes is None else split_names(probes)
    asked = Asked(target, names, seed, jobs, limit, receipts, python)
    run_fp8(matrix, asked, fmt, output, verbose=verbose)
