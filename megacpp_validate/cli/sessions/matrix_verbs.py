"""The verb of the matrix: many cells, one job a cell, here or through a scheduler."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from ..app import MatrixOption, OutputOption, app, split_names
from ..told_options import PageFormat, PageFormatOption
from .session_options import PythonOption, ReceiptsOption, SeedOption

LONGEST_LIMIT_S: Final = 604_800.0  # of a cell: a week. More is a typing error, and infinity no time of a job


class JobLauncher(StrEnum):
    """What runs the jobs."""

    LOCAL = "local"
    SLURM = "slurm"


@app.command("matrix")
def run_many_cells(
    targets: Annotated[list[str], typer.Option("--targets", help="Rows of matrix/targets.toml, with commas.")],
    stacks: Annotated[
        list[str] | None,
        typer.Option("--stacks", help="Rows of matrix/stacks.toml, or native; else the pinned one, on the cpu native."),
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(help="A stack of your own: NAME=overlay:DIR, NAME=venv:LOCK, NAME=image:..., NAME=python:PATH."),
    ] = None,
    overlays: Annotated[
        list[Path] | None, typer.Option(help="Folders of releases; those of MEGACPP_OVERLAYS without it.")
    ] = None,
    probes: Annotated[
        list[str] | None, typer.Option("--probes", help="Modules, compositions, FP8 and smoke cells; all without it.")
    ] = None,
    cells: Annotated[
        list[str] | None, typer.Option("--cells", help="Of those, only these ids, such as native-cpu-*.")
    ] = None,
    launcher: Annotated[JobLauncher, typer.Option("--launcher", help="What runs the jobs.")] = JobLauncher.LOCAL,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="TOML file: what the site's Slurm is told.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Jobs at a time; 0: what this machine has, or all.")] = 0,
    limit: Annotated[float, typer.Option(min=1, max=LONGEST_LIMIT_S, help="Seconds that one cell may take.")] = 900.0,
    wait: Annotated[float, typer.Option(min=0, help="Minutes for all cells; 0: as long as it takes.")] = 0.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again what has a receipt already.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be run; start nothing.")] = False,
    seed: SeedOption = 0,
    receipts: ReceiptsOption = Path(".megacpp/matrix"),
    python: PythonOption = "",
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Run many cells, one job a cell, and bring a receipt of each home, whatever happens on the way.

    Started again, it goes on: it finds the jobs that are on their way, and runs what has no receipt.
    """
    from .matrix_runs import MatrixAsked, run_matrix

    asked = MatrixAsked(
        targets=split_names(targets),
        stacks=None if stacks is None else split_names(stacks),
        environments=tuple(environment or ()),
        overlays=tuple(overlays or ()),
        probes=None if probes is None else split_names(probes),
        cells=None if cells is None else split_names(cells),
        launcher=launcher.value,
        cluster=cluster,
        jobs=jobs,
        limit_s=limit,
        wait_s=wait * 60,
        fresh=fresh,
        seed=seed,
        receipts=receipts,
        python=python,
    )
    run_matrix(matrix, asked, fmt, output, only_plan=plan)
