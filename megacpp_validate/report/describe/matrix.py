"""A run of many cells in words: a row a cell, then why those that are not good are not, and what was run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...environments.matrix import MatrixCell, MatrixPlan, MatrixRun
from ...text import count
from ..document import Block, Bullets, Diagnostic, Document, Heading, Paragraph, Preformatted, Table
from ..marks import bad, good, missing, quiet
from .receipt import MARKS


def describe_matrix(run: MatrixRun) -> Document:
    """Every cell, the reasons of those that are not good, and the infrastructure faults before the others."""
    counts = Counter(MARKS[cell.outcome].word for cell in run.cells)
    listed = ", ".join(f"{number} {word}" for word, number in counts.items())
    all_of = "The one cell" if len(run.cells) == 1 else f"All {len(run.cells)} cells"
    if run.holds:
        summary, mark = f"{all_of} {'hold' if len(run.cells) > 1 else 'holds'}: {listed}.", good("open")
    elif run.breaks:
        summary, mark = f"Not every cell holds, of {count(run.cells, 'cell')}: {listed}.", bad("closed")
    else:
        summary, mark = f"Not every cell ran, of {count(run.cells, 'cell')}: {listed}.", missing("incomplete")
    return Document("Matrix", summary, mark, tuple(_describe_blocks(run)), tuple(map(_describe_cell, run.cells)))


def _describe_blocks(run: MatrixRun) -> Iterator[Block]:
    yield Table(
        ("cell", "outcome", "node", "seconds", "again"),
        tuple(
            (f"`{cell.cell}`", MARKS[cell.outcome], "(kept)" if cell.kept else cell.node, f"{cell.seconds:.1f}",
             str(len(cell.retries)) if cell.retries else "")
            for cell in run.cells
        ),
        numeric=frozenset({3, 4}),
        optional=frozenset({2}),
    )  # fmt: skip
    yield from (_describe_cell(cell) for cell in run.cells if not cell.outcome.is_good)
    if again := [cell for cell in run.cells if cell.retries]:
        names = Counter(fault.partition(":")[0] for cell in again for fault in cell.retries)
        listed = ", ".join(f"{name} {number} times" for name, number in names.items())
        yield Heading("Run again")
        yield Paragraph(f"Infrastructure faults ended attempts at {count(again, 'cell')}: {listed}.")
        yield Bullets(tuple(f"`{cell.cell}`: {fault}" for cell in again for fault in cell.retries))
    yield Paragraph(f"Receipts and logs: `{run.folder}`; {run.seconds:.1f} s.")


def _describe_cell(cell: MatrixCell) -> Diagnostic:
    return Diagnostic(
        name=cell.cell,
        mark=MARKS[cell.outcome],
        group=f"{cell.stack}-{cell.target}",
        message=cell.reason,
        fields=tuple(("again", fault) for fault in cell.retries),
        seconds=cell.seconds,
    )


def describe_matrix_plan(plan: MatrixPlan) -> Document:
    """Every cell that would be run, and the options of the jobs of each target."""
    gpus = sum(cell.gpus for cell in plan.cells)
    needs = f", {count(gpus, 'GPU')} if all run at once" if gpus else ""
    summary = f"{count(plan.cells, 'cell')} would run with the launcher {plan.launcher}{needs}."
    rows = tuple(
        (f"`{cell.cell}`", str(cell.gpus), f"{cell.seconds:g} s", f"{cell.limit_s:g} s") for cell in plan.cells
    )
    blocks: tuple[Block, ...] = (Table(("cell", "GPUs", "expected", "limit"), rows, numeric=frozenset({1, 2, 3})),)
    options = {cell.target: cell.asks for cell in plan.cells if cell.asks}
    blocks += tuple(Preformatted(f"{target}: sbatch {' '.join(words)}") for target, words in options.items())
    return Document("Matrix, planned", summary, quiet("plan"), blocks)
