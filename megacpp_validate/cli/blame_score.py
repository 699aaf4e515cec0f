"""The verb of the blame score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app, split_names, write_error_line
from .output import finish

FaultsOption = Annotated[
    list[str] | None, typer.Option("--faults", help="Ids, with commas or repeated; all of the release without it.")
]
OverlaysOption = Annotated[
    list[Path] | None, typer.Option("--overlays", help="Site folders, or folders of them; else MEGACPP_OVERLAYS.")
]
CopiesOption = Annotated[Path | None, typer.Option("--copies", help="Folder for the copies with faults.")]
JudgeOption = Annotated[bool, typer.Option("--judge-only", help="Run nothing: judge the receipts that exist.")]
JobsOption = Annotated[int, typer.Option(min=0, help="Cells at a time; 0: what suits the cores.")]
LimitOption = Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")]
PythonOption = Annotated[str, typer.Option(help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")]


@app.command()
def blame_score(
    faults: FaultsOption = None,
    release: Annotated[str, typer.Option(help="Of Transformer Engine; the pinned one without it.")] = "",
    clean: Annotated[int, typer.Option(min=0, help="Clean pairs without speeds.")] = 6,
    timed_clean: Annotated[int, typer.Option(min=0, help="Clean pairs with speeds.")] = 3,
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml.")] = "h200",
    overlays: OverlaysOption = None,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for the receipts and logs.")] = Path(
        ".megacpp/blame-score"
    ),
    copies: CopiesOption = None,
    judge_only: JudgeOption = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of weights and inputs; clean pairs take those after it.")
    ] = 0,
    jobs: JobsOption = 0,
    limit: LimitOption = 300.0,
    python: PythonOption = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="List every fault with who was named.")] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Is the right module blamed? Faults are planted in copies of Transformer Engine, and every probe is run on each.

    Started again, it runs what has no receipt yet.
    """
    from ..canary.dynamic.planting import PlantOptions, run_planted
    from ..catalog.bridge import read_catalog
    from ..report.describe.scores import describe_planted

    options = PlantOptions(
        split_names(faults or ()), release, target, tuple(overlays or ()), receipts, copies, judge_only,
        seed, jobs, limit, python, matrix, clean, timed_clean,
    )  # fmt: skip
    result = run_planted(read_catalog(matrix), "blame-score", options, write_error_line)
    finish(result, describe_planted, fmt, output, verbose=verbose)
