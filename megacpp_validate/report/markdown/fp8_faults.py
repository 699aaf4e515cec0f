"""The score of the FP8 cells in Markdown."""

from __future__ import annotations

from ...canary.dynamic.fp8_fault_score import Fp8FaultScore
from ..words.fp8_faults import (
    HEADINGS,
    find_unsettled,
    name_verdict,
    say_alarms,
    say_caught,
    say_green,
    say_lacking,
    say_seen,
    say_verdict,
)
from .text import escape


def tell_fp8_faults(score: Fp8FaultScore) -> list[str]:
    """Sentences, whatever is not right, and the table of every fault."""
    lines = [escape(" ".join(filter(None, (say_caught(score), say_alarms(score), say_lacking(score))))), ""]
    if not score.judged:
        return lines
    lines += [
        f"- **{escape(row.fault)}** ({escape(row.release)}): {escape(row.says)} {escape(say_verdict(row))}"
        for row in find_unsettled(score)
    ]
    lines += ["", f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
    for row in score.faults:
        cells = (row.fault, row.release, row.says, name_verdict(row), say_seen(row), say_green(row))
        lines.append(f"| {' | '.join(map(escape, cells))} |")
    return [*lines, ""]
