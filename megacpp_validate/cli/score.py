"""`score`: the suite's own score."""

from pathlib import Path

from .app import Context, Result, verb


@verb("scores:describe_score")
def score(context: Context) -> Result:
    """What is the suite worth? Kill rate, blame accuracy and false alarms, with their intervals and their day.

    Exit code 2: a file holds no score, 4: the selftest was not of every mutant, or of another matrix.
    """
    from ..canary.dynamic.scores import read_score
    from ..catalog.file import matrix_folder

    root = (context.matrix or matrix_folder()).absolute().parent
    names = ("selftest.json", "blame_score.json", "blame_score_held_out.json")
    return read_score(context.catalog, root, *(Path("docs/evidence", name) for name in names))
