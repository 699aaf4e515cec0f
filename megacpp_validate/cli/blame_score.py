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
    shard: Annotated[str, typer.Option(metavar="I/N", help="Every N-th fault from the I-th on.")] = "1/1",
    clean: Annotated[int, typer.Option(min=0, help="Clean pairs without speeds.")] = 6,
    timed_clean: Annotated[int, typer.Option(min=0, help="Clean pairs with speeds.")] = 3,
    target: Target = "h200",
    overlays: Overlays = None,
    receipts: Receipts = Path(".megacpp/blame-score"),
    copies: Copies = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Receipts of earlier runs, which count where this one has none; oldest first.",
        ),
    ] = None,
    judge_only: JudgeOnly = False,
    seed: Seed = 0,
    jobs: Jobs = 0,
    limit: Limit = 300.0,
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Is the right module blamed? Faults are planted in copies of Transformer Engine, and every probe is run on each.

    Started again, it runs what has no receipt yet. Shards of one run may share a folder of receipts, one after
    the other.
    """
    from ..canary.dynamic.plant_runs import PlantOptions, run_blame_score
    from ..catalog.bridge import read_catalog

    one, _, n = shard.partition("/")
    options = PlantOptions(
        split_names(faults), tuple(filter(None, [release])), target, tuple(overlays or ()), receipts, copies,
        judge_only, seed, jobs, limit, python, matrix,
        (int(one), int(n)) if one.isdecimal() and n.isdecimal() else (0, 0), clean, timed_clean, tuple(earlier or ()),
    )  # fmt: skip
    return run_blame_score(read_catalog(matrix), options, write_error_line)
