"""The score of the suite in Markdown: the kill table that the README shows."""

from __future__ import annotations

from megacpp_validate.evidence.selftest import SelftestResult

from ..words.selftest import (
    find_unsettled,
    say_blame_accuracy,
    say_false_alarms,
    say_kill_rate,
    say_unsettled,
    score_modules,
)
from .text import escape


def tell_selftest(result: SelftestResult) -> list[str]:
    """Rates, the table a module, and whatever is not as it should be."""
    lines = [escape(say_kill_rate(result)), escape(say_blame_accuracy(result)), escape(say_false_alarms(result)), ""]
    lines += ["| bridge module | mutants | killed | blamed rightly |", "| --- | --: | --: | --: |"]
    lines += [
        f"| {score.module} | {score.mutants} | {score.killed} | {score.blamed_rightly} |"
        for score in score_modules(result)
    ]
    unsettled = find_unsettled(result)
    if unsettled or result.false_alarms or result.lost:
        lines.append("")
    lines += [
        f"- **{escape(row.mutant.id)}** ({escape(row.mutant.module)}): {escape(say_unsettled(row))}"
        for row in unsettled
    ]
    lines += [
        f"- false alarm: {escape(alarm.cell)}, seed {alarm.seed}: {escape(alarm.check)}"
        for alarm in result.false_alarms
    ]
    lines += [f"- lost: {escape(reason)}" for reason in result.lost]
    return lines
