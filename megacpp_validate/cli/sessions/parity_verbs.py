"""The verbs of parity: run the probes, show what receipts hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import Format, FormatOption, MatrixOption, OutputOption, app, split_names
from ..told_options import PageFormat, PageFormatOption
from .session_options import PythonOption, ReceiptsOption, SeedOption, VerboseOption


@app.command()
def parity(
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml: h200, b200, gb10, cpu.")],
    probes: Annotated[
        list[str] | None, typer.Option("--probes", help="Probes to run, with commas or repeated; all without it.")
    ] = None,
    seed: SeedOption = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Probes at a time; 0: 8 on a GPU, 2 without.")] = 0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one probe may take.")] = 300.0,
    receipts: ReceiptsOption = Path(".megacpp/receipts"),
    python: PythonOption = "",
    verbose: VerboseOption = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Does every bridge module compute what native PyTorch computes, on the backend that was asked for?

    One process a module, forward and every gradient against an fp64 reference. MEGACPP_DISABLE_TE=1 asks for the
    native paths.
    """
    from .parity_runs import run_parity
    from .session_runs import Asked

    names = None if probes is None else split_names(probes)
    asked = Asked(target, names, seed, jobs, limit, receipts, python)
    run_parity(read_catalog(matrix), asked, fmt, output, verbose=verbose)


@app.command()
def support_grid(
    folders: Annotated[list[Path], typer.Argument(help="Folders of receipts.")],
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Which modules hold in which stack, as receipts show it: a row a stack, a column a module."""
    from .parity_runs import show_support

    show_support(read_catalog(matrix), folders, Format(fmt), output)
