"""The verb that plants faults in the low-precision stack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import Exit, Format, MatrixOption, OutputOption, app, refuse, split_names
from ..sessions.seeds import LARGEST_SEED
from ..told_options import PageFormat, PageFormatOption

Limit = Annotated[float, typer.Option(min=1, max=86_400.0, help="Seconds that one cell may take.")]


@app.command()
def fp8_faults(
    faults: Annotated[
        list[str] | None, typer.Option("--faults", help="Ids, with commas or repeated; all of the release without it.")
    ] = None,
    releases: Annotated[
        list[str] | None,
        typer.Option("--releases", help="Of Transformer Engine, with commas or repeated; the pinned one without it."),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Those that were chosen before any check was written.")
    ] = False,
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml.")] = "h200",
    overlays: Annotated[
        list[Path] | None, typer.Option("--overlays", help="Site folders, or folders of them; else MEGACPP_OVERLAYS.")
    ] = None,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for the receipts and logs.")] = Path(
        ".megacpp/fp8-faults"
    ),
    copies: Annotated[Path | None, typer.Option("--copies", help="Folder for the copies with faults.")] = None,
    judge_only: Annotated[
        bool, typer.Option("--judge-only", help="Run nothing: judge the receipts there are.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of weights and inputs.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Cells at a time; 0: what suits the cores.")] = 0,
    limit: Limit = 300.0,
    python: Annotated[str, typer.Option(help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="List every fault with the checks that saw it.")] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Does the right check see it? Faults are planted in copies of Transformer Engine; the cells of FP8 run on each.

    Of each fault the cells that must turn red run, and one that must stay green. Started again, it runs what has no
    receipt yet.
    """
    from .fp8_faults_runs import Asked, run_fp8_faults

    if faults is not None and not split_names(faults):
        refuse("no fault is selected. Next step: name one, or leave --faults out for all.", Exit.NOTHING_SELECTED)
    if judge_only and not receipts.is_dir():
        refuse(
            f"there is no folder {receipts} to judge. Likely cause: a typing error, or no run wrote there. Next step: "
            "give the folder that an earlier run wrote its receipts to.",
            Exit.WRONG_ARGUMENTS,
        )
    asked = Asked(
        faults=split_names(faults or ()), releases=split_names(releases or ()), held_out=held_out, target=target,
        overlays=tuple(overlays or ()), receipts=receipts, copies=copies, judge_only=judge_only, seed=seed, jobs=jobs,
        limit_s=limit, python=python,
    )  # fmt: skip
    run_fp8_faults(read_catalog(matrix), matrix, asked, Format(fmt), output, verbose=verbose)
