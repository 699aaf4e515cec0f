"""The verb that shows the suite's own score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from .app import Format, FormatOption, MatrixOption, OutputOption, app
from .output import finish, write_result

_SHOWN: Final = "docs/examples/score.md"


@app.command()
def score(
    selftest: Annotated[
        Path, typer.Option(help="What `nox -s selftest -- --format json` wrote of all mutants.")
    ] = Path("docs/evidence/selftest.json"),
    blame: Annotated[Path, typer.Option(help="What blame-score wrote as JSON.")] = Path(
        "docs/evidence/blame_score.json"
    ),
    held_out: Annotated[Path, typer.Option(help="The same on faults that nobody tuned the blame on.")] = Path(
        "docs/evidence/blame_score_held_out.json"
    ),
    write: Annotated[
        bool, typer.Option("--write", help="Write docs/evidence/score.json and docs/examples/score.md.")
    ] = False,
    fmt: FormatOption = Format.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """What is the suite worth? Kill rate, blame accuracy and false alarms, with their intervals and their day.

    Exit code 2: a file holds no score, 4: the selftest was not of every mutant, or of another matrix.
    """
    from functools import partial

    from ..canary.dynamic.scores import SCORE, read_score
    from ..catalog.bridge import read_catalog
    from ..catalog.file import matrix_folder
    from ..report.describe.scores import describe_score

    root = (matrix or matrix_folder()).absolute().parent
    result = read_score(read_catalog(matrix), root, selftest, blame, held_out)
    if write:
        write_result(result, describe_score, Format.JSON, root / SCORE)
        page = partial(describe_score, folder=str(Path(_SHOWN).parent))
        write_result(result, page, Format.MARKDOWN, root / _SHOWN)
    finish(result, describe_score, fmt, output)
