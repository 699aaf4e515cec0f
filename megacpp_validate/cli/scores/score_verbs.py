"""The verb that shows the suite's own score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...catalog.bridge import read_catalog
from ..app import MatrixOption, OutputOption, app
from ..told_options import PageFormat, PageFormatOption


@app.command()
def score(
    selftest: Annotated[
        Path, typer.Option(help="What `nox -s selftest -- --format json` told of every mutant.")
    ] = Path("docs/evidence/selftest.json"),
    blame: Annotated[Path, typer.Option(help="What blame-score told as JSON.")] = Path(
        "docs/evidence/blame_score.json"
    ),
    held_out: Annotated[Path, typer.Option(help="The same on faults that nobody tuned the blame on.")] = Path(
        "docs/evidence/blame_score_held_out.json"
    ),
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write docs/evidence/score.json and docs/examples/score.md, and the README's block."
        ),
    ] = False,
    fmt: PageFormatOption = PageFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """What is the suite worth? Kill rate, blame accuracy and false alarms, with their intervals and their day.

    Exit code 0: told, 2: a file holds no score, 4: the selftest was not of every mutant, or of another matrix.
    """
    from .score_runs import Asked, run_score

    run_score(read_catalog(matrix), matrix, Asked(selftest, blame, held_out, write), fmt, output)
