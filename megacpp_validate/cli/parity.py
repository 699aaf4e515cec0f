"""`parity`: the bridge modules against native PyTorch."""

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
def parity(
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml: h200, b200, gb10, cpu.")],
    probes: Annotated[
        list[str] | None, typer.Option("--probes", help="Probes to run, with commas or repeated; all without it.")
    ] = None,
    seed: SeedOption = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Probes at a time; 0: 8 on a GPU, 2 without.")] = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one probe may take.")] = 300.0,
    receipts: ReceiptsOption = Path(".megacpp/receipts"),
    python: PythonOption = "",
    verbose: VerboseOption = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Compare every bridge module with native PyTorch, on the backend that is requested.

    One process a module, forward and every gradient against an fp64 reference. MEGACPP_DISABLE_TE=1 requests the
    native paths.
    """
    from ..catalog.bridge import read_catalog
    from ..environments.host_session import SessionOptions, run_parity
    from ..report.describe.session import describe_session
    from .output import finish
    from .progress import CellProgress

    names = None if probes is None else split_names(probes)
    options = SessionOptions(target, names, seed, jobs, limit, receipts, python)
    with CellProgress() as progress:
        result = run_parity(read_catalog(matrix), options, progress)
    finish(result, describe_session, fmt, output, verbose=verbose)
