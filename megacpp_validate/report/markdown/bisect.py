"""A search for the first bad release in Markdown."""

from __future__ import annotations

from ...canary.dynamic.bisect_result import BisectResult
from ..words.bisect import find_moving, list_points, say_axis, say_cost, say_doubts, say_headline, say_next, say_turns
from .text import escape


def tell_bisect(result: BisectResult) -> list[str]:
    """The answer, a row a point, and what speaks against it."""
    lines = [f"## First bad release for {escape(result.module)}", "", f"**{escape(say_headline(result))}**", ""]
    heads = [*(escape(say_axis(axis.name)) for axis in find_moving(result)), "verdict", "runs", "why"]
    lines += [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in list_points(result):
        mark = f"{row.mark.symbol} {row.mark.word}"
        lines.append(f"| {' | '.join((*map(escape, row.choices), mark, row.runs, escape(row.reason)))} |")
    lines.append("")
    lines += [f"- {escape(sentence)}" for sentence in say_turns(result)]
    lines += [f"- **{escape(doubt)}**" for doubt in say_doubts(result)]
    lines += [
        "",
        escape(f"Judged by the {result.tier} tier. {say_cost(result)}"),
        "",
        f"Next: {escape(say_next(result))}",
    ]
    return lines
