"""A run of many cells in words."""

from __future__ import annotations

from collections import Counter

from ...environments.matrix_result import MatrixPlan, MatrixRun
from ..marks import mark_cell
from ..summaries import count


def summarize_matrix(run: MatrixRun) -> str:
    """The verdict of a run in a sentence."""
    counts = Counter(mark_cell(cell.outcome).word for cell in run.cells)
    listed = ", ".join(f"{number} {word}" for word, number in counts.items())
    if len(run.cells) == 1:
        return f"The one cell {'holds' if run.holds else 'does not hold' if run.breaks else 'did not run'}: {listed}."
    if run.holds:
        return f"All {len(run.cells)} cells hold: {listed}."
    if run.breaks:
        return f"Of {len(run.cells)} cells not all hold: {listed}."
    return f"Of {len(run.cells)} cells not all ran: {listed}."


def say_retries(run: MatrixRun) -> str:
    """How often infrastructure had to be made good."""
    again = [cell for cell in run.cells if cell.retries]
    if not again:
        return "no cell had to be run again"
    names = Counter(fault.partition(":")[0] for cell in again for fault in cell.retries)
    listed = ", ".join(f"{name} {number}x" for name, number in names.items())
    return f"{len(again)} cell(s) were run again after infrastructure faults: {listed}"


def summarize_plan(plan: MatrixPlan) -> str:
    """What would be run, in a sentence."""
    gpus = sum(cell.gpus for cell in plan.cells)
    needs = f", {gpus} GPU(s) if all run at once" if gpus else ""
    cells, jobs = (count(len(plan.cells), noun) for noun in ("cell", "job"))
    return f"{cells} as {jobs}, through the launcher {plan.launcher}{needs}."
