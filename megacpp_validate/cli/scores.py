"""Faults planted, to score the suite."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import Context, Limit, Result, Seed, fill, show_event, verb
from .options import Faults, Jobs, Overlays, Release, Target


@verb("scores:describe_planted")
def selftest(
    context: Context,
    mutants: Annotated[tuple[str, ...], "Ids of mutants; all without one."] = (),
    /,
    clean: Annotated[int, typer.Option(min=0, help="Probe runs without a fault, at least.")] = 200,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    limit_s: Limit = 120.0,
) -> Result:
    """What does the suite catch? Faults are planted, one at a time, and every probe is run; then without any.

    Needs no GPU: Transformer Engine is stood in for by a double of plain torch.
    """
    from ..canary.dynamic.selftest import run_selftest

    return run_selftest(context.catalog, mutants, clean=clean, seed=seed, jobs=jobs, limit_s=limit_s)


@verb("scores:describe_planted", runs=("blame-score", 300.0))
def blame_score(
    context: Context,
    faults: Faults = (),
    release: Release = "",
    clean: Annotated[int, typer.Option(min=0, help="Copies without a fault.")] = 6,
    target: Target = "h200",
    overlays: Overlays = (),
    jobs: Jobs = 0,
) -> Result:
    """Is the right module blamed? Faults are planted in copies of Transformer Engine, and every probe is run on each.

    Started again, it runs what has no receipt yet.
    """
    from ..canary.dynamic.planting import PlantOptions, run_planted

    return run_planted(context.catalog, "blame-score", fill(PlantOptions, locals()), show_event)


@verb("scores:describe_planted", runs=("fp8-faults", 300.0))
def fp8_faults(
    context: Context,
    faults: Faults = (),
    release: Release = "",
    held_out: Annotated[bool, "Those that were chosen before any check was written."] = False,
    target: Target = "h200",
    overlays: Overlays = (),
    jobs: Jobs = 0,
) -> Result:
    """Does the right check see it? Faults are planted in copies of Transformer Engine; the cells of FP8 run on each.

    Of each fault the cells that must turn red run, and one that must stay green. Started again, it runs what has no
    receipt yet.
    """
    from ..canary.dynamic.planting import PlantOptions, run_planted

    return run_planted(context.catalog, "fp8-faults", fill(PlantOptions, locals()), show_event)


@verb("scores:describe_planted", runs=("smoke_faults", 900.0))
def smoke_faults(
    context: Context,
    target: Target = "cpu",
    faults: Faults = (),
    jobs: Annotated[int, typer.Option(min=1, max=2, help="Cells at a time, each of 2 or 4 ranks.")] = 2,
) -> Result:
    """Is what goes wrong between ranks caught, and named? Faults are planted in real runs of tiny models.

    Each must be seen by its own check, which must name the place: step, rank, module. Runs without a fault must stay
    green. The rows are in matrix/smoke_faults.toml.
    """
    from ..canary.dynamic.planting import run_smoke_faults
    from ..catalog.planted import read_smoke_faults
    from ..environments.plan import RunOptions

    options = fill(RunOptions, locals())
    known = read_smoke_faults(context.catalog)
    return run_smoke_faults(context.catalog, known, faults, options, show_event)


@verb("scores:describe_score")
def score(context: Context) -> Result:
    """What is the suite worth? Kill rate, blame accuracy and false alarms, with their intervals and their day.

    Exit code 2: a file holds no score, 4: a file is missing, or the selftest was not of every mutant or of another
    matrix.
    """
    from ..canary.dynamic.scores import read_score

    return read_score(context.catalog)
