"""`moe-smoke`: the hybrid model trained on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import Result, split_names, verb
from .options import Cells, Limit, Matrix, Python, Receipts, Seed


@verb("session:describe_session", verbose="List every check with its bounds.")
def moe_smoke(
    target: Annotated[str, typer.Option(help="cpu, h200, b200; else the GPU that is here, or cpu.")] = "",
    cells: Cells = None,
    ranks: Annotated[int, typer.Option(min=0, help="Only cells that take so many devices; 0: all.")] = 0,
    launcher: Annotated[Literal["local", "torchrun", "slurm"], typer.Option(help="What starts the ranks.")] = "local",
    seed: Seed = 0,
    limit: Limit = 900.0,
    receipts: Receipts = Path(".megacpp/moe_smoke"),
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Train the whole model, spread over ranks, and compare with one rank; report where the time goes.

    The cells are the rows of matrix/moe_smoke.toml. A cell that takes more GPUs than are here is not run, which is
    never good.
    """
    from ..catalog.bridge import read_catalog
    from ..environments.host_session import SessionOptions, run_smoke
    from .progress import Progress

    # One cell at a time: the ranks of a cell have the GPUs, or the cores, to themselves.
    options = SessionOptions(target, split_names(cells) or None, seed, 1, limit, receipts, python)
    with Progress() as progress:
        return run_smoke(read_catalog(matrix), options, progress.show_cell, ranks=ranks, launcher=launcher)
