"""The verb of the suite's own score."""

from __future__ import annotations

from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import Format, MatrixOption, OutputOption, app
from ..sessions.seeds import LARGEST_SEED
from ..told_options import PageFormat, PageFormatOption


@app.command()
def selftest(
    mutants: Annotated[list[str] | None, typer.Argument(help="Ids of mutants; all without one.")] = None,
    clean: Annotated[int, typer.Option(min=0, help="Probe runs without a fault, at least.")] = 200,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Of the first run; each run has a seed of its own.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one run may take.")] = 120.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List every mutant with the check that killed it.")
    ] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """What does the suite catch? Faults are planted, one at a time, and every probe is run; then without any.

    Needs no GPU: Transformer Engine is stood in for by a double of plain torch.
    """
    from .selftest_runs import Asked, run_selftest

    asked = Asked(tuple(mutants or ()), clean, seed, jobs, limit)
    run_selftest(read_catalog(matrix), asked, Format(fmt), output, verbose=verbose)
