"""`smoke-faults`: whether planted faults between ranks are seen, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Result, split_names, verb
from .options import Faults, Limit, Matrix, Python, Receipts, Seed, Target


@verb("scores:describe_planted", verbose="List every fault with what its check named.")
def smoke_faults(
    target: Target = "cpu",
    faults: Faults = None,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(min=1, max=2, help="Cells at a time, each of 2 or 4 ranks.")] = 2,
    limit: Limit = 900.0,
    receipts: Receipts = Path(".megacpp/smoke_faults"),
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Is what goes wrong between ranks caught, and named? Faults are planted in real runs of tiny models.

    Each must be seen by its own check, which must name the place: step, rank, module. Runs without a fault must stay
    green. The rows are in matrix/smoke_faults.toml.
    """
    from ..canary.dynamic.planting import run_smoke_faults
    from ..catalog.bridge import read_catalog
    from ..catalog.planted import read_smoke_faults
    from ..environments.host_session import SessionOptions
    from .progress import Progress

    names, catalog = split_names(faults), read_catalog(matrix)
    known = read_smoke_faults((row.id for row in catalog.targets), matrix)
    options = SessionOptions(target, None, seed, jobs, limit, receipts, python)
    with Progress() as progress:
        return run_smoke_faults(catalog, known, names, options, progress.show_cell)
