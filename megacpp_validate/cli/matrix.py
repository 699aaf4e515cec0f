"""`matrix`: many cells of many stacks and targets, here or on a Slurm cluster."""

import os
from pathlib import Path
from typing import Annotated, Literal

from .app import Answer, Context, Result, fill, show_event, split_names, verb
from .options import Cells, Fresh, Jobs, Overlays, Probes


@verb("session:describe_matrix", runs=("matrix", 900.0))
def matrix(
    context: Context,
    targets: Annotated[tuple[str, ...], "Rows of matrix/targets.toml, with commas.", split_names],
    stacks: Annotated[
        tuple[str, ...], "Rows of matrix/stacks.toml, or native; else the pinned one, on the cpu native.", split_names
    ] = (),
    environment: Annotated[tuple[str, ...], "NAME=overlay:DIR | image:... | python:PATH; repeated."] = (),
    overlays: Overlays = (),
    probes: Probes = (),
    cells: Cells = (),
    launcher: Annotated[Literal["local", "slurm"], "What runs the jobs."] = "local",
    cluster: Annotated[Path | None, "TOML file: options of this site's Slurm."] = None,
    jobs: Jobs = 0,
    fresh: Fresh = False,
    plan: Annotated[bool, "Show what would be run; start nothing."] = False,
) -> Result | Answer:
    """Run many cells, one process or Slurm job a cell, and collect a receipt of each.

    The same command goes on after an interrupt or a kill: it finds the jobs that are on their way, and runs what has no
    receipt.
    """
    from ..environments.matrix import MatrixOptions, plan_matrix, run_matrix
    from ..environments.slurm import read_cluster
    from ..environments.stacks import read_spec

    given, catalog = {**locals()}, context.catalog
    site = read_cluster(cluster, [target.id for target in catalog.targets])
    options = fill(
        MatrixOptions, given, specs=tuple(map(read_spec, environment)), cluster=site, variables=dict(os.environ)
    )
    if plan:
        return Answer(plan_matrix(catalog, options), "session:describe_matrix_plan")
    return run_matrix(catalog, options, show_event)
