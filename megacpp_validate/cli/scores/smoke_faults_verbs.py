"""The verb that plants faults in the smoke run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..app import Exit, Format, MatrixOption, OutputOption, app, refuse, split_names
from ..sessions.session_options import PythonOption, ReceiptsOption, SeedOption, VerboseOption
from ..told_options import PageFormat, PageFormatOption


@app.command()
def smoke_faults(
    target: Annotated[
        str, typer.Option("--target", help="A row of matrix/targets.toml; most faults are of cpu.")
    ] = "cpu",
    faults: Annotated[
        list[str] | None, typer.Option("--faults", help="Ids, with commas or repeated; all without it.")
    ] = None,
    seed: SeedOption = 0,
    jobs: Annotated[int, typer.Option(min=1, max=2, help="Cells at a time, each of 2 or 4 ranks.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")] = 900.0,
    receipts: ReceiptsOption = Path(".megacpp/smoke_faults"),
    python: PythonOption = "",
    page: Annotated[Path | None, typer.Option("--page", help="A file that gets the table in Markdown, too.")] = None,
    verbose: VerboseOption = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Is what goes wrong between ranks caught, and named? Faults are planted in real runs of tiny models.

    Each must be seen by its own check, which must name the place: step, rank, module. Runs without a fault must stay
    green. The rows are in matrix/smoke_faults.toml.
    """
    from ..sessions.session_runs import Asked
    from .smoke_faults_runs import run_smoke_faults

    if faults is not None and not split_names(faults):
        refuse("no fault is selected. Next step: name one, or leave --faults out for all.", Exit.NOTHING_SELECTED)
    asked = Asked(target, None, seed, jobs, limit, receipts, python)
    run_smoke_faults(matrix, asked, split_names(faults or ()), Format(fmt), output, page, verbose=verbose)
