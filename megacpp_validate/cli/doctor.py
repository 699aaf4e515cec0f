"""`doctor`: what an interpreter loads, and what breaks by it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .app import Context, Limit, Python, Result, fill, verb


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

    options = fill(DoctorOptions, locals())
    needs = read_needs([module.id for module in context.catalog.modules], context.matrix)
    return run_doctor(context.catalog, needs, options, os.environ)
