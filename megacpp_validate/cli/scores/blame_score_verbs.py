"""The verb of the blame score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import Format, MatrixOption, OutputOption, app, split_names
from ..sessions.seeds import LARGEST_SEED
from ..told_options import PageFormat, PageFormatOption

Limit = Annotated[float, typer.Option(min=1, max=86_400.0, help="Seconds that one cell may take.")]


@app.command()
def blame_score(
    faults: Annotated[
        list[str] | None, typer.Option("--faults", help="Ids, with commas or repeated; all of the release without it.")
    ] = None,
    release: Annotated[str, typer.Option(help="Of Transformer Engine; the pinned one without it.")] = "",
    shard: Annotated[str, typer.Option(metavar="I/N", help="Every N-th fault from the I-th on.")] = "1/1",
    clean: Annotated[int, typer.Option(min=0, help="Clean pairs without speeds.")] = 6,
    timed_clean: Annotated[int, typer.Option(min=0, help="Clean pairs with speeds.")] = 3,
    target: Annotated[str, typer.Option("--target", help="A row of matrix/targets.toml.")] = "h200",
    overlays: Annotated[
        list[Path] | None, typer.Option("--overlays", help="Site folders, or folders of them; else MEGACPP_OVERLAYS.")
    ] = None,
    receipts: Annotated[Path, typer.Option("--receipts", help="Folder for the receipts and logs.")] = Path(
        ".megacpp/blame-score"
    ),
    copies: Annotated[Path | None, typer.Option("--copies", help="Folder for the copies with faults.")] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            "--earlier",
            exists=True,
            file_okay=False,
            help="Receipts of earlier runs, which count where this one has none; oldest first.",
        ),
    ] = None,
    judge_only: Annotated[
        bool, typer.Option("--judge-only", help="Run nothing: judge the receipts there are.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Of weights and inputs; clean pairs take those after it.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Cells at a time; 0: what suits the cores.")] = 0,
    limit: Limit = 300.0,
    python: Annotated[str, typer.Option(help="Interpreter of the stack; else MEGACPP_PYTHON, else the host's.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="List every fault with who was named.")] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """Is the right module blamed? Faults are planted in copies of Transformer Engine, and every probe is run on each.

    Started again, it runs what has no receipt yet. Shards of one run may share a folder of receipts, one after
    the other.
    """
    from .blame_score_runs import Asked, run_blame_score

    asked = Asked(
        faults=split_names(faults or ()), release=release, shard=shard, clean=clean, timed_clean=timed_clean,
        target=target, overlays=tuple(overlays or ()), receipts=receipts, earlier=tuple(earlier or ()), copies=copies,
        judge_only=judge_only, seed=seed, jobs=jobs, limit_s=limit, python=python,
    )  # fmt: skip
    run_blame_score(read_catalog(matrix), matrix, asked, Format(fmt), output, verbose=verbose)
