"""A run of many cells in words: a row a cell, then the reasons of those that are not good, and what was run again."""

from __future__ import annotations

from ...environments.matrix import MatrixCell, MatrixPlan, MatrixRun
from ...text import count
from ..document import Block, Diagnostic, Document, Paragraph, Preformatted, Table
from ..marks import mark_exit, mark_of, quiet
from .words import tally


def describe_matrix(run: MatrixRun) -> Document:
    """Every cell, and each that is not good or was run again in full."""
    rows = tuple(
        (
            f"`{cell.cell}`",
            mark_of(cell.outcome),
            "(kept)" if cell.kept else cell.node,
            f"{cell.seconds:.1f}",
            str(len(cell.retries) or ""),
        )
        for cell in run.cells
    )
    table = Table(("cell", "outcome", "node", "seconds", "again"), rows, "", frozenset({3, 4}), frozenset({2}))
    cases = tuple(map(_describe_cell, run.cells))
    shown = [case for case, cell in zip(cases, run.cells, strict=True) if cell.retries or not cell.outcome.is_good]
    where = Paragraph(f"Receipts and logs: `{run.folder}`; {run.seconds:.1f} s.")
    summary = f"{count(run.cells, 'cell')}: {tally(mark_of(cell.outcome).word for cell in run.cells)}."
    mark = mark_exit(0 if run.holds else 1 if run.breaks else 4, otherwise="incomplete")
    return Document("Matrix", summary, mark, (table, *shown, where), cases)


def _describe_cell(cell: MatrixCell) -> Diagnostic:
    group, again = f"{cell.stack}-{cell.target}", (("again", tuple(cell.retries)),)
    return Diagnostic(cell.cell, mark_of(cell.outcome), group, cell.reason, again, seconds=cell.seconds)


def describe_matrix_plan(plan: MatrixPlan) -> Document:
    """Every cell that would be run, and the options of the jobs of each target."""
    rows = tuple(
        (f"`{cell.cell}`", str(cell.gpus), f"{cell.seconds:g} s", f"{cell.limit_s:g} s") for cell in plan.cells
    )
    options = {cell.target: cell.asks for cell in plan.cells if cell.asks}
    blocks: tuple[Block, ...] = (
        Table(("cell", "GPUs", "expected", "limit"), rows, numeric=frozenset({1, 2, 3})),
        *(Preformatted(f"{target}: sbatch {' '.join(words)}") for target, words in options.items()),
    )
    gpus = sum(cell.gpus for cell in plan.cells)
    cells = count(plan.cells, "cell")
    summary = f"{cells} would run with the launcher {plan.launcher}; GPUs if all run at once: {gpus}."
    return Document("Matrix, planned", summary, quiet("plan"), blocks)
