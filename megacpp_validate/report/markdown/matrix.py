"""A run of many cells in Markdown."""

from __future__ import annotations

from ...environments.matrix_result import MatrixPlan, MatrixRun
from ..marks import mark_cell
from ..words.matrix import say_retries, summarize_matrix, summarize_plan
from .text import escape


def tell_matrix(run: MatrixRun) -> list[str]:
    """Every cell, then what was run again."""
    lines = ["## Matrix", "", f"**{escape(summarize_matrix(run))}** {escape(say_retries(run))}.", ""]
    lines += ["| | cell | node | seconds | why |", "| --- | --- | --- | ---: | --- |"]
    for cell in run.cells:
        mark = mark_cell(cell.outcome)
        node = "(kept)" if cell.kept else cell.node
        row = (escape(cell.cell), escape(node), f"{cell.seconds:.1f}", escape(cell.reason))
        lines.append(f"| {mark.symbol} {mark.word} | {' | '.join(row)} |")
    again = [f"- {escape(cell.cell)}: {escape(fault)}" for cell in run.cells for fault in cell.retries]
    return [*lines, *(["", "### Run again", "", *again] if again else [])]


def tell_matrix_plan(plan: MatrixPlan) -> list[str]:
    """Every job that would be given."""
    lines = ["## Matrix, planned", "", f"**{escape(summarize_plan(plan))}**", ""]
    lines += ["| cell | GPUs | expected | limit | after |", "| --- | ---: | ---: | ---: | --- |"]
    for cell in plan.cells:
        row = (escape(cell.cell), str(cell.gpus), f"{cell.seconds:g} s", f"{cell.limit_s:g} s", escape(cell.after))
        lines.append(f"| {' | '.join(row)} |")
    return lines
