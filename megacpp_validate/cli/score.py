"""`score`: the suite's own score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from .app import Format, Result, verb
from .options import Matrix

_PAGE: Final = "docs/examples/score.md"


@verb("scores:describe_score")
def score(
    selftest: Annotated[
        Path, typer.Option(help="What `nox -s selftest -- --format json` wrote of all mutants.")
    ] = Path("docs/evidence/selftest.json"),
    blame: Annotated[Path, typer.Option(help="What blame-score wrote as JSON.")] = Path(
        "docs/evidence/blame_score.json"
    ),
    held_out: Annotated[Path, typer.Option(help="The same for faults that the blame rules were not tuned on.")] = Path(
        "docs/evidence/blame_score_held_out.json"
    ),
    write: Annotated[
        bool, typer.Option("--write", help="Write docs/evidence/score.json and docs/examples/score.md.")
    ] = False,
    matrix: Matrix = None,
) -> Result:
    """What is the suite worth? Kill rate, blame accuracy and false alarms, with their intervals and their day.

    Exit code 2: a file holds no score, 4: the selftest was not of every mutant, or of another matrix.
    """
    from ..canary.dynamic.scores import SCORE, read_score
    from ..catalog.bridge import read_catalog
    from ..catalog.file import matrix_folder
    from .output import write_result

    root = (matrix or matrix_folder()).absolute().parent
    result = read_score(read_catalog(matrix), root, selftest, blame, held_out)
    if write:
        write_result(result, "", root / SCORE, fmt=Format.JSON)
        links = str(Path(_PAGE).parent)
        write_result(result, "scores:describe_score", root / _PAGE, fmt=Format.MARKDOWN, folder=links)
    return result
