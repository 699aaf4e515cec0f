"""`selftest`: the suite's own faults, planted one at a time."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import Result, verb
from .options import Limit, Matrix, Seed


@verb("scores:describe_selftest", verbose="List every mutant with the check that killed it.")
def selftest(
    mutants: Annotated[list[str] | None, typer.Argument(help="Ids of mutants; all without one.")] = None,
    clean: Annotated[int, typer.Option(min=0, help="Probe runs without a fault, at least.")] = 200,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    limit: Limit = 120.0,
    matrix: Matrix = None,
) -> Result:
    """What does the suite catch? Faults are planted, one at a time, and every probe is run; then without any.

    Needs no GPU: Transformer Engine is stood in for by a double of plain torch.
    """
    from ..canary.dynamic.selftest import run_selftest
    from ..catalog.bridge import read_catalog

    return run_selftest(read_catalog(matrix), mutants or (), clean=clean, seed=seed, jobs=jobs, limit_s=limit)
