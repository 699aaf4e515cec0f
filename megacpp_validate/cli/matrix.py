"""`matrix`: many cells of many stacks and targets, here or on a Slurm cluster."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app, split_names

if TYPE_CHECKING:
    from ..environments.fleet import Event
    from .progress import Progress

LONGEST_LIMIT_S: Final = 604_800.0  # of a cell: a week. More is a typing error, and infinity no time of a job
StacksOption = Annotated[
    list[str] | None,
    typer.Option("--stacks", help="Rows of matrix/stacks.toml, or native; else the pinned one, on the cpu native."),
]
StackOption = Annotated[
    list[str] | None,
    typer.Option(help="A stack of your own: NAME=overlay:DIR, NAME=venv:LOCK, NAME=image:..., NAME=python:PATH."),
]
OverlaysOption = Annotated[
    list[Path] | None, typer.Option(help="Folders of releases; those of MEGACPP_OVERLAYS without it.")
]
ProbesOption = Annotated[
    list[str] | None, typer.Option("--probes", help="Modules, compositions, FP8 and smoke cells; all without it.")
]
CellsOption = Annotated[
    list[str] | None, typer.Option("--cells", help="Of those, only these ids, such as native-cpu-*.")
]


class JobLauncher(StrEnum):
    """What runs the jobs."""

    LOCAL = "local"
    SLURM = "slurm"


@app.command("matrix")
def run_many_cells(
    targets: Annotated[list[str], typer.Option("--targets", help="Rows of matrix/targets.toml, with commas.")],
    stacks: StacksOption = None,
    environment: StackOption = None,
    overlays: OverlaysOption = None,
    probes: ProbesOption = None,
    cells: CellsOption = None,
    launcher: Annotated[JobLauncher, typer.Option("--launcher", help="What runs the jobs.")] = JobLauncher.LOCAL,
    cluster: Annotated[Path | None, typer.Option("--cluster", help="TOML file: options of this site's Slurm.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Jobs at a time; 0: what this machine has, or all.")] = 0,
    limit: Annotated[float, typer.Option(min=1, max=LONGEST_LIMIT_S, help="Seconds that one cell may take.")] = 900.0,
    wait: Annotated[float, typer.Option(min=0, help="Minutes for all cells; 0: as long as it takes.")] = 0.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again what has a receipt already.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be run; start nothing.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and inputs.")] = 0,
    receipts: Annotated[Path, typer.Option(help="Folder for the receipts and logs.")] = Path(".megacpp/matrix"),
    python: Annotated[str, typer.Option(help="Interpreter of the stacks; else MEGACPP_PYTHON, else the host's.")] = "",
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Run many cells, one process or Slurm job a cell, and collect a receipt of each.

    The same command goes on after an interrupt or a kill: it finds the jobs that are on their way, and runs what has no
    receipt.
    """
    import os

    from .. import TOOL
    from ..catalog.bridge import read_catalog
    from ..environments.chosen import read_spec
    from ..environments.interpreter import read_commit
    from ..environments.matrix import MatrixOptions, plan_matrix, run_matrix
    from ..environments.slurm import read_cluster
    from ..errors import NothingSelected
    from ..report.describe.matrix import describe_matrix, describe_matrix_plan
    from .output import finish
    from .progress import Progress

    catalog = read_catalog(matrix)
    named = {"targets": targets, "stacks": stacks, "probes": probes, "cells": cells}
    lists = {name: split_names(texts) for name, texts in named.items() if texts is not None}
    if empty := [name for name, found in lists.items() if not found]:
        raise NothingSelected(f"no cell is selected: --{empty[0]} is empty. Next step: name one, or leave it out.")
    options = MatrixOptions(
        **lists, specs=tuple(map(read_spec, environment or ())), overlays=tuple(overlays or ()), python=python,
        launcher=launcher.value, cluster=read_cluster(cluster, [target.id for target in catalog.targets]), jobs=jobs,
        limit_s=limit, wait_s=wait * 60, fresh=fresh, receipts=receipts, variables=dict(os.environ), tool=TOOL,
        commit=read_commit(), seed=seed,
    )  # fmt: skip
    if plan:
        finish(plan_matrix(catalog, options), describe_matrix_plan, fmt, output)
    running: dict[str, None] = {}
    with Progress() as progress:
        run = run_matrix(catalog, options, lambda event: _show(event, running, progress))
    finish(run, describe_matrix, fmt, output)


def _show(event: Event, running: dict[str, None], progress: Progress) -> None:
    """A line for each cell that has ended, or is run again; a status line of those that run."""
    cell, receipt, done = event.cell.order.cell, event.receipt, f"{event.done}/{event.total}"
    if receipt is not None:
        running.pop(cell, None)
        where = f", {event.note}" if event.note else ""
        took = "kept" if event.reused else f"{receipt.seconds.get('total', 0.0):.1f} s{where}"
        progress.say(f"{done:>7} {receipt.outcome.value:12} {cell} ({took})")
    else:
        running[cell] = None
        if ": " in event.note:
            progress.say(f"{done:>7} {'again':12} {cell}: {event.note}")
    progress.show(f"{done}; ", running)
