"""The verb that plants faults in the low-precision stack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import NothingSelected, WrongArguments
from .app import Format, FormatOption, MatrixOption, OutputOption, app, split_names, write_error_line
from .blame_score import (
    CopiesOption,
    FaultsOption,
    JobsOption,
    JudgeOption,
    LimitOption,
    OverlaysOption,
    PythonOption,
)  # fmt: skip
from .output import finish


@app.command()
def fp8_faults(
    faults: FaultsOption = None,
    release: Annotated[str, typer.Option(help="Of Transformer Engine; the pinned one without it.")] = "",
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Those that were chosen before any check was written.")
    ] = False,
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml.")] = "h200",
    overlays: OverlaysOption = None,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for the receipts and logs.")] = Path(
        ".megacpp/fp8-faults"
    ),
    copies: CopiesOption = None,
    judge_only: JudgeOption = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and inputs.")] = 0,
    jobs: JobsOption = 0,
    limit: LimitOption = 300.0,
    python: PythonOption = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="List every fault with the checks that saw it.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Does the right check see it? Faults are planted in copies of Transformer Engine; the cells of FP8 run on each.

    Of each fault the cells that must turn red run, and one that must stay green. Started again, it runs what has no
    receipt yet.
    """
    from ..canary.dynamic.planting import PlantOptions, run_planted
    from ..catalog.bridge import read_catalog
    from ..report.describe.scores import describe_planted

    if faults is not None and not split_names(faults):
        raise NothingSelected("no fault is selected. Next step: name one, or leave --faults out for all.")
    if judge_only and not receipts.is_dir():
        raise WrongArguments(
            f"there is no folder {receipts} to judge. Likely cause: a typing error, or no run wrote there. Next step: "
            "give the folder that an earlier run wrote its receipts to."
        )
    options = PlantOptions(
        split_names(faults or ()), release, target, tuple(overlays or ()), receipts, copies,
        judge_only, seed, jobs, limit, python, matrix, held_out=held_out,
    )  # fmt: skip
    result = run_planted(read_catalog(matrix), "fp8-faults", options, write_error_line)
    finish(result, describe_planted, fmt, output, verbose=verbose)
