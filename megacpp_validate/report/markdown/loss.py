"""What the loss gate decided about a folder of curves, in Markdown."""

from __future__ import annotations

from ...gate.loss_result import LossGateResult
from ..words.checks import say_check
from ..words.loss import find_failed_losses, mark_loss, name_loss, say_loss, summarize_losses
from .text import escape


def tell_losses(result: LossGateResult) -> list[str]:
    """Lines of Markdown: a table of verdicts, and the checks that failed."""
    lines = [f"## The loss gate on {escape(result.folder)}", "", f"**{escape(summarize_losses(result))}**", ""]
    lines += ["| | recipe | why |", "| --- | --- | --- |"]
    for verdict in result.verdicts:
        mark = mark_loss(verdict)
        lines.append(f"| {mark.symbol} {mark.word} | {escape(name_loss(verdict))} | {escape(say_loss(verdict))} |")
    for verdict in result.verdicts:
        if failed := find_failed_losses(verdict):
            lines += [
                "",
                f"### {escape(name_loss(verdict))}",
                "",
                *(f"- {escape(say_check(check))}" for check in failed),
            ]
    return lines
