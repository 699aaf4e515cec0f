"""The verb of the selftest."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app
from .output import finish


@app.command()
def selftest(
    mutants: Annotated[list[str] | None, typer.Argument(help="Ids of mutants; all without one.")] = None,
    clean: Annotated[int, typer.Option(min=0, help="Probe runs without a fault, at least.")] = 200,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of the first run; each run has a seed of its own.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one run may take.")] = 120.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List every mutant with the check that killed it.")
    ] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """What does the suite catch? Faults are planted, one at a time, and every probe is run; then without any.

    Needs no GPU: Transformer Engine is stood in for by a double of plain torch.
    """
    from ..canary.dynamic.selftest import run_selftest
    from ..catalog.bridge import read_catalog
    from ..report.describe.scores import describe_selftest

    result = run_selftest(read_catalog(matrix), mutants or (), clean=clean, seed=seed, jobs=jobs, limit_s=limit)
    finish(result, describe_selftest, fmt, output, verbose=verbose)
