"""The upgrade canary's answer over all its tiers in Markdown."""

from __future__ import annotations

from ...canary.dynamic.upgrade_result import StepResult, UpgradeResult
from ..marks import mark_cell
from ..words.upgrade import (
    mark_change,
    say_cascades,
    say_culprit,
    say_outcome,
    say_runs,
    say_seconds,
    say_step,
    say_timing,
    say_timings,
    say_version,
    summarize_step,
    summarize_upgrade,
)
from .text import escape


def tell_upgrade(result: UpgradeResult) -> list[str]:
    """The answer, the grid, and every step with its blame; the other tiers are told by their own renderers."""
    lines = [f"## Upgrade canary on {escape(result.target)}", "", f"**{escape(summarize_upgrade(result))}**", ""]
    if result.grid is not None:
        lines += [f"| stack | {' | '.join(escape(module) for module in result.grid.modules)} |"]
        lines += ["| --- |" + " --- |" * len(result.grid.modules)]
        for row in result.grid.rows:
            marks = (mark_cell(cell.outcome) for cell in row.cells)
            lines.append(f"| {escape(row.stack)} | {' | '.join(f'{mark.symbol} {mark.word}' for mark in marks)} |")
        lines += [f"\n{escape(stack.stack)}: {escape(stack.problem)}" for stack in result.stacks if stack.problem]
        lines += [f"\nnot read: {escape(file)}: {escape(why)}" for file, why in result.grid.unreadable.items()]
    for step in result.steps:
        lines += ["", *tell_step(step)]
    if result.stacks:
        lines += ["", f"{escape(say_runs(result))}; {escape(say_seconds(result))}."]
    return lines


def tell_step(step: StepResult) -> list[str]:
    """One step: who is to blame, what is filed under it, what became of each module, what else changed."""
    lines = [f"### {escape(say_step(step))}", "", f"**{escape(summarize_step(step))}**", ""]
    for culprit in step.culprits:
        lines.append(f"- **{escape(say_culprit(culprit))}**: {escape(culprit.summary)}")
        lines += [f"  - {escape(line)}" for line in culprit.evidence]
        if culprit.entry_points:
            lines.append(f"  - Transformer Engine: {escape(', '.join(culprit.entry_points))}")
        if culprit.cascades:
            lines.append(f"  - {escape(say_cascades(culprit))}")
        lines.append(f"  - next: {escape(culprit.next_step)}")
    lines += [f"- no evidence on {escape(cell)}: {escape(reason)}" for cell, reason in step.lost.items()]
    lines += [f"- changed too: {escape(say_version(row))}" for row in step.versions]
    told = [
        f"- {escape(row.module)}: {mark_change(row).symbol} {escape(mark_change(row).word)} "
        f"({say_outcome(row.before)}, then {say_outcome(row.after)})"
        for row in step.modules
    ]
    lines += _fold("Every module", told)
    if step.timings:
        rows = [f"- {escape(row.module)}: {escape(say_timing(row))}" for row in step.timings]
        lines += _fold(escape(say_timings(step)), rows)
    return lines


def _fold(title: str, lines: list[str]) -> list[str]:
    return ["", f"<details><summary>{title}</summary>", "", *lines, "", "</details>"] if lines else []
