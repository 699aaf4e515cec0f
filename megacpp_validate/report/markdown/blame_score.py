"""The score of the blame in Markdown."""

from __future__ import annotations

from ...canary.dynamic.blame_score import BlameScore
from ..words.blame_score import (
    HEADINGS,
    find_loud,
    find_unsettled,
    say_control,
    say_controls,
    say_culprits,
    say_lacking,
    say_right,
    say_verdict,
    score_modules,
)
from .text import escape


def tell_blame_score(score: BlameScore) -> list[str]:
    """Sentences, the table a module, whatever is not right, and every fault."""
    said = filter(None, (say_right(score), say_controls(score), say_lacking(score)))
    lines = [escape(" ".join(said)), ""]
    if not score.judged and not score.seen_controls:
        return lines
    lines += [f"| bridge module | {' | '.join(HEADINGS)} |", f"| --- |{' --: |' * len(HEADINGS)}"]
    lines += [f"| {row.module} | {' | '.join(map(escape, row.cells))} |" for row in score_modules(score)]
    lines.append("")
    lines += [
        f"- **{escape(row.fault)}** ({escape(row.release)}): {escape(row.says)} {escape(say_verdict(row))}"
        for row in find_unsettled(score)
    ]
    lines += [
        f"- **{escape(row.name)}** ({escape(row.release)}): {escape(say_control(row))}" for row in find_loud(score)
    ]
    lines += ["", "<details><summary>Every fault, and who is named for it</summary>", ""]
    lines += ["| fault | release | verdict | named |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {escape(row.fault)} | {escape(row.release)} | {row.verdict.value} | {escape(say_culprits(row.culprits))} |"
        for row in score.faults
    ]
    return [*lines, "", "</details>"]
