"""`doctor`: what an interpreter loads, and what breaks by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .app import Result, verb
from .options import Limit, Matrix, Python


@verb("doctor:describe_doctor", verbose="List every compiled file.")
def doctor(
    python: Python = "",
    overlays: Annotated[
        list[Path] | None, typer.Option(help="Site folders put before its own; repeated, first one wins.")
    ] = None,
    target: Annotated[str, typer.Option(help="A row of matrix/targets.toml; else that of the GPU.")] = "",
    stack: Annotated[str, typer.Option(help="A row of matrix/stacks.toml that it must be.")] = "",
    limit: Limit = 180.0,
    jobs: Annotated[int, typer.Option(min=1, help="Imports at a time.")] = 4,
    matrix: Matrix = None,
) -> Result:
    """Check what an interpreter loads, whether it fits together, and what breaks where it does not.

    Every vendor package is imported in a process of its own. Exit code 0: nothing breaks, 1: something breaks, 2: no
    row for the target, the stack or the GPU, 4: something could not be checked, 5: the interpreter cannot be used, or
    has no stack.
    """
    from ..catalog.bridge import read_catalog
    from ..catalog.needs import read_needs
    from ..environments.doctor import DoctorOptions, run_doctor

    catalog = read_catalog(matrix)
    needs = read_needs([module.id for module in catalog.modules], matrix)
    options = DoctorOptions(python, tuple(overlays or ()), target, stack, limit, jobs)
    return run_doctor(catalog, needs, options, os.environ)
