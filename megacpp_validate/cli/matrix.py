"""`matrix`: many cells of many stacks and targets, here or on a Slurm cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from .. import TOOL
from .app import Answer, Result, split_names, verb
from .options import Cells, Fresh, Jobs, Limit, Overlays, Python, Receipts, Seed


@verb("matrix:describe_matrix")
def matrix(
    targets: Annotated[list[str], typer.Option(help="Rows of matrix/targets.toml, with commas.")],
    stacks: Annotated[
        list[str] | None,
        typer.Option(help="Rows of matrix/stacks.toml, or native; else the pinned one, on the cpu native."),
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(help="A stack of your own: NAME=overlay:DIR, NAME=venv:LOCK, NAME=image:..., NAME=python:PATH."),
    ] = None,
    overlays: Overlays = None,
    probes: Annotated[
        list[str] | None, typer.Option(help="Modules, compositions, FP8 and smoke cells; all without it.")
    ] = None,
    cells: Cells = None,
    launcher: Annotated[Literal["local", "slurm"], typer.Option(help="What runs the jobs.")] = "local",
    cluster: Annotated[Path | None, typer.Option(help="TOML file: options of this site's Slurm.")] = None,
    jobs: Jobs = 0,
    limit: Limit = 900.0,
    wait: Annotated[float, typer.Option(min=0, help="Minutes for all cells; 0: as long as it takes.")] = 0.0,
    fresh: Fresh = False,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be run; start nothing.")] = False,
    seed: Seed = 0,
    receipts: Receipts = Path(".megacpp/matrix"),
    python: Python = "",
    folder: Annotated[Path | None, typer.Option("--matrix", help="Folder of the matrix files.")] = None,
) -> Result | Answer:
    """Run many cells, one process or Slurm job a cell, and collect a receipt of each.

    The same command goes on after an interrupt or a kill: it finds the jobs that are on their way, and runs what has no
    receipt.
    """
    from ..catalog.bridge import read_catalog
    from ..environments.chosen import read_spec
    from ..environments.interpreter import read_commit
    from ..environments.matrix import MatrixOptions, plan_matrix, run_matrix
    from ..environments.slurm import read_cluster
    from .progress import Progress

    catalog = read_catalog(folder)
    named = {"targets": targets, "stacks": stacks, "probes": probes, "cells": cells}
    options = MatrixOptions(
        **{name: split_names(texts) for name, texts in named.items() if texts is not None},
        specs=tuple(map(read_spec, environment or ())), overlays=tuple(overlays or ()), python=python,
        launcher=launcher, cluster=read_cluster(cluster, [target.id for target in catalog.targets]), jobs=jobs,
        limit_s=limit, wait_s=wait * 60, fresh=fresh, receipts=receipts, variables=dict(os.environ), tool=TOOL,
        commit=read_commit(), seed=seed,
    )  # fmt: skip
    if plan:
        return Answer(plan_matrix(catalog, options), "matrix:describe_matrix_plan")
    with Progress() as progress:
        return run_matrix(catalog, options, progress.show_event)
