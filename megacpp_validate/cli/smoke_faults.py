"""The verb that plants faults in the smoke run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import NothingSelected
from .app import Format, FormatOption, MatrixOption, OutputOption, app, split_names
from .output import finish, write_result


@app.command()
def smoke_faults(
    target: Annotated[
        str, typer.Option("--target", help="A row of matrix/targets.toml; most faults belong to cpu.")
    ] = "cpu",
    faults: Annotated[
        list[str] | None, typer.Option("--faults", help="Ids, with commas or repeated; all without it.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of weights and inputs; the same seed gives the same numbers.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=2, help="Cells at a time, each of 2 or 4 ranks.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")] = 900.0,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for the receipts and logs.")] = Path(
        ".megacpp/smoke_faults"
    ),
    python: Annotated[str, typer.Option(help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")] = "",
    page: Annotated[Path | None, typer.Option("--page", help="A file that gets the table in Markdown, too.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="List every fault with what its check named.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Is what goes wrong between ranks caught, and named? Faults are planted in real runs of tiny models.

    Each must be seen by its own check, which must name the place: step, rank, module. Runs without a fault must stay
    green. The rows are in matrix/smoke_faults.toml.
    """
    from ..canary.dynamic.smoke_faults import run_smoke_faults
    from ..catalog.bridge import read_catalog
    from ..catalog.smoke_faults import read_smoke_faults
    from ..environments.host_session import SessionOptions
    from ..report.describe.scores import describe_planted
    from .progress import CellProgress

    if faults is not None and not split_names(faults):
        raise NothingSelected("no fault is selected. Next step: name one, or leave --faults out for all.")
    catalog = read_catalog(matrix)
    known = read_smoke_faults((row.id for row in catalog.targets), matrix)
    options = SessionOptions(target, None, seed, jobs, limit, receipts, python)
    with CellProgress() as progress:
        result = run_smoke_faults(catalog, known, split_names(faults or ()), options, progress)
    if page is not None:
        write_result(result, describe_planted, Format.MARKDOWN, page)
    finish(result, describe_planted, fmt, output, verbose=verbose)
