"""`moe-smoke`: the hybrid model trained on this machine."""

from __future__ import annotations

from enum import StrEnum
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


class Launcher(StrEnum):
    """What starts the ranks of a run."""

    LOCAL = "local"
    TORCHRUN = "torchrun"
    SLURM = "slurm"


@app.command()
def moe_smoke(
    target: Annotated[str, typer.Option("--target", help="cpu, h200, b200; else the GPU that is here, or cpu.")] = "",
    cells: Annotated[
        list[str] | None, typer.Option("--cells", help="Cells to run, with commas or repeated; all without it.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=0, help="Only cells that take so many devices; 0: all.")] = 0,
    launcher: Annotated[Launcher, typer.Option("--launcher", help="What starts the ranks.")] = Launcher.LOCAL,
    seed: SeedOption = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")] = 900.0,
    receipts: ReceiptsOption = Path(".megacpp/moe_smoke"),
    python: PythonOption = "",
    verbose: VerboseOption = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Train the whole model, spread over ranks, and compare with one rank; report where the time goes.

    The cells are the rows of matrix/moe_smoke.toml. A cell that takes more GPUs than are here is not run, which is
    never good.
    """
    from ..catalog.bridge import read_catalog
    from ..environments.host_session import SessionOptions, run_smoke
    from ..report.describe.session import describe_session
    from .output import finish
    from .progress import CellProgress

    names = None if cells is None else split_names(cells)
    # One cell at a time: the ranks of a cell have the GPUs, or the cores, to themselves.
    options = SessionOptions(target, names, seed, 1, limit, receipts, python)
    with CellProgress() as progress:
        result = run_smoke(read_catalog(matrix), options, progress, ranks=ranks, launcher=launcher.value)
    finish(result, describe_session, fmt, output, verbose=verbose)
