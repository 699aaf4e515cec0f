"""The verb `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app


@app.command()
def doctor(
    python: Annotated[str, typer.Option(help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")] = "",
    overlays: Annotated[
        list[Path] | None, typer.Option("--overlays", help="Site folders put before its own; repeated, first one wins.")
    ] = None,
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml; else that of the GPU.")] = "",
    stack: Annotated[str, typer.Option("--stack", help="A row of matrix/stacks.toml that it must be.")] = "",
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one import may take.")] = 180.0,
    jobs: Annotated[int, typer.Option(min=1, help="Imports at a time.")] = 4,
    verbose: Annotated[bool, typer.Option("--verbose", help="List every compiled file.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Check what an interpreter loads, whether it fits together, and what breaks where it does not.

    Every vendor package is imported in a process of its own. Exit code 0: nothing breaks, 1: something breaks, 2: no
    row for the target, the stack or the GPU, 4: something could not be checked, 5: the interpreter cannot be used, or
    has no stack.
    """
    import os

    from ..catalog.bridge import read_catalog
    from ..catalog.needs import read_needs
    from ..environments.doctor import DoctorOptions, run_doctor
    from ..report.describe.doctor import describe_doctor
    from .output import finish

    catalog = read_catalog(matrix)
    needs = read_needs([module.id for module in catalog.modules], matrix)
    options = DoctorOptions(python, tuple(overlays or ()), target, stack, limit, jobs)
    finish(run_doctor(catalog, needs, options, os.environ), describe_doctor, fmt, output, verbose=verbose)
