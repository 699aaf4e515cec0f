"""`blame-score`: whether planted faults of Transformer Engine are blamed on the right module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Result, split_names, verb, write_error_line
from .options import Copies, Faults, Jobs, JudgeOnly, Limit, Matrix, Overlays, Python, Receipts, Seed, Target


@verb("scores:describe_planted", verbose="List every fault with the module that was named.")
def blame_score(
    faults: Faults = None,
    release: Annotated[str, typer.Option(help="Of Transformer Engine; the pinned one without it.")] = "",
    clean: Annotated[int, typer.Option(min=0, help="Clean pairs without speeds.")] = 6,
    timed_clean: Annotated[int, typer.Option(min=0, help="Clean pairs with speeds.")] = 3,
    target: Target = "h200",
    overlays: Overlays = None,
    receipts: Receipts = Path(".megacpp/blame-score"),
    copies: Copies = None,
    judge_only: JudgeOnly = False,
    seed: Seed = 0,
    jobs: Jobs = 0,
    limit: Limit = 300.0,
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Is the right module blamed? Faults are planted in copies of Transformer Engine, and every probe is run on each.

    Started again, it runs what has no receipt yet.
    """
    from ..canary.dynamic.planting import PlantOptions, run_planted
    from ..catalog.bridge import read_catalog

    options = PlantOptions(
        split_names(faults), release, target, tuple(overlays or ()), receipts, copies, judge_only, seed, jobs, limit,
        python, matrix, clean, timed_clean,
    )  # fmt: skip
    return run_planted(read_catalog(matrix), "blame-score", options, write_error_line)
