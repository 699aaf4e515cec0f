"""The verb of the doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import Format, MatrixOption, OutputOption, app
from ..told_options import PageFormat, PageFormatOption


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
    verbose: Annotated[bool, typer.Option("--verbose", help="List every mapped library and compiled file.")] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """What does an interpreter load, does it fit together, and what breaks where it does not?

    Every vendor package is imported in a process of its own. Exit code 0: nothing breaks, 1: something does, 2: no row
    for what was asked, or for the GPU, 4: not everything could be looked at, 5: the interpreter cannot be used.
    """
    from ...catalog.needs import read_needs
    from .doctor_runs import Asked, run_doctor

    catalog = read_catalog(matrix)
    needs = read_needs([module.id for module in catalog.modules], matrix)
    asked = Asked(python, tuple(overlays or ()), target, stack, limit, jobs)
    run_doctor(catalog, needs, asked, Format(fmt), output, verbose=verbose)
