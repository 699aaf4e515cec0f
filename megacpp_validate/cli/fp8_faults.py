"""`fp8-faults`: whether planted faults of the low-precision stack are seen by the right checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import WrongArguments
from .app import Result, split_names, verb, write_error_line
from .options import Copies, Faults, Jobs, JudgeOnly, Limit, Matrix, Overlays, Python, Receipts, Seed, Target


@verb("scores:describe_planted", verbose="List every fault with the checks that saw it.")
def fp8_faults(
    faults: Faults = None,
    release: Annotated[str, typer.Option(help="Of Transformer Engine; the pinned one without it.")] = "",
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Those that were chosen before any check was written.")
    ] = False,
    target: Target = "h200",
    overlays: Overlays = None,
    receipts: Receipts = Path(".megacpp/fp8-faults"),
    copies: Copies = None,
    judge_only: JudgeOnly = False,
    seed: Seed = 0,
    jobs: Jobs = 0,
    limit: Limit = 300.0,
    python: Python = "",
    matrix: Matrix = None,
) -> Result:
    """Does the right check see it? Faults are planted in copies of Transformer Engine; the cells of FP8 run on each.

    Of each fault the cells that must turn red run, and one that must stay green. Started again, it runs what has no
    receipt yet.
    """
    from ..canary.dynamic.planting import PlantOptions, run_planted
    from ..catalog.bridge import read_catalog

    if judge_only and not receipts.is_dir():
        raise WrongArguments(
            f"there is no folder {receipts} to judge. Likely cause: a typing error, or no run wrote there. Next step: "
            "give the folder that an earlier run wrote its receipts to."
        )
    options = PlantOptions(
        split_names(faults), release, target, tuple(overlays or ()), receipts, copies, judge_only, seed,
        jobs, limit, python, matrix, held_out=held_out,
    )  # fmt: skip
    return run_planted(read_catalog(matrix), "fp8-faults", options, write_error_line)
