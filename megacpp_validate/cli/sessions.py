"""Cells run on this machine, or on a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import Answer, Context, Limit, Python, Result, fill, say, show_event, split_names, verb
from .options import Cells, Fresh, Jobs, Overlays, Probes, Target


@verb("session:describe_session", runs=("receipts", 300.0))
def parity(context: Context, target: Target, probes: Probes = (), jobs: Jobs = 0) -> Result:
    """Compare every bridge module with native PyTorch, on the backend that is requested.

    One process a module, forward and every gradient against an fp64 reference. MEGACPP_DISABLE_TE=1 requests the
    native paths.
    """
    from ..environments.host_session import run_parity
    from ..environments.plan import RunOptions

    return run_parity(context.catalog, fill(RunOptions, locals()), show_event)


@verb("session:describe_session", runs=("fp8", 300.0))
def fp8(context: Context, target: Target = "h200", probes: Probes = (), jobs: Jobs = 0) -> Result:
    """Check FP8 recipes, their state and owners, and whether training in FP8 follows BF16.

    The cells are the rows of matrix/fp8.toml; those that train have a limit of their own there. A recipe that the
    target lacks must be refused there, which is good.
    """
    from ..environments.plan import RunOptions
    from ..gate.fp8 import run_fp8

    return run_fp8(context.catalog, fill(RunOptions, locals()), show_event)


@verb("session:describe_session", runs=("moe_smoke", 900.0))
def moe_smoke(
    context: Context,
    target: Annotated[str, "cpu, h200, b200; else the GPU that is here, or cpu."] = "",
    cells: Cells = (),
    ranks: Annotated[int, typer.Option(min=0, help="Only cells that take so many devices; 0: all.")] = 0,
) -> Result:
    """Train the whole model, spread over ranks, and compare with one rank; report where the time goes.

    The cells are the rows of matrix/moe_smoke.toml. A cell that takes more GPUs than are here is not run, which is
    never good. Exit code 2: the FP8 policy refuses the preset of a cell.
    """
    from ..catalog.policies import read_fp8_policy
    from ..environments.host_session import run_smoke
    from ..environments.plan import RunOptions
    from ..gate.fp8 import refuse_cells

    # One cell at a time: the ranks of a cell have the GPUs, or the cores, to themselves.
    options = fill(RunOptions, locals(), probes=cells, jobs=1)
    policy = read_fp8_policy(context.catalog)
    return run_smoke(context.catalog, options, show_event, ranks=ranks, admit=partial(refuse_cells, policy=policy))


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
    cluster: Annotated[Path | None, typer.Option(exists=True, help="TOML file: options of this site's Slurm.")] = None,
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
    options = fill(MatrixOptions, given, specs=tuple(map(read_spec, environment)), cluster=site)
    if plan:
        return Answer(plan_matrix(catalog, options), "session:describe_matrix_plan")
    return run_matrix(catalog, options, show_event)


@verb("scores:describe_ablation", runs=("ablation", 900.0))
def ablate(
    context: Context,
    features: Annotated[
        tuple[str, ...], "feature=NAME: rows of matrix/postures.toml, repeated or with commas; or all."
    ],
    /,
    pairs: Annotated[int, typer.Option(min=4, help="Pairs of each feature at most.")] = 64,
    device: Annotated[Literal["cuda", "cpu"], "Where to train."] = "cuda",
    target: Annotated[str, "Whose FP8 recipes hold, on a GPU."] = "h200",
) -> Result:
    """Measure what a feature does to the time of a step: a win, a tax, or no effect larger than 5%.

    Steps without the feature and with it take turns in one process, until the interval decides or the budget ends:
    --limit seconds for all features, --pairs for each. Exit code 0: every feature was decided. 2: arguments or the
    matrix are wrong, or the FP8 policy refuses the preset. 4: a feature is undecided, failed, or did not run on what
    was requested.
    """
    from ..catalog.policies import read_fp8_policy
    from ..catalog.postures import read_postures
    from ..gate.ablation import AblationOptions, choose_features, run_ablation

    posture = read_postures(context.catalog)
    options = fill(
        AblationOptions, locals(), features=choose_features(list(features), posture),
        target=target if device == "cuda" else "cpu",
    )  # fmt: skip
    policy = read_fp8_policy(context.catalog)
    return run_ablation(posture, policy, options, say)


@verb("doctor:describe_doctor")
def doctor(
    context: Context,
    python: Python = "",
    overlays: Annotated[tuple[Path, ...], "Site folders put before its own; repeated, first one wins."] = (),
    target: Annotated[str, "A row of matrix/targets.toml; else that of the GPU."] = "",
    stack: Annotated[str, "A row of matrix/stacks.toml that it must be."] = "",
    limit_s: Limit = 180.0,
    jobs: Annotated[int, typer.Option(min=1, help="Imports at a time.")] = 4,
) -> Result:
    """Check what an interpreter loads, whether it fits together, and what breaks where it does not.

    Every vendor package is imported in a process of its own. Exit code 0: nothing breaks, 1: something breaks, 2: no
    row for the target, the stack or the GPU, 4: something could not be checked, 5: the interpreter cannot be used, or
    has no stack.
    """
    from ..catalog.images import read_needs
    from ..environments.doctor import DoctorOptions, run_doctor

    return run_doctor(context.catalog, read_needs(context.catalog), fill(DoctorOptions, locals()))
