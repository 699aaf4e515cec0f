"""The score of the smoke run's checks in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...canary.dynamic.smoke_fault_score import SmokeFaultScore
from ..words.smoke_faults import (
    CLEAN_HEADINGS,
    HEADINGS,
    PLACE_HEADINGS,
    find_unsettled,
    name_check,
    name_verdict,
    say_alarms,
    say_caught,
    say_clean,
    say_lacking,
    say_named,
    say_others,
    say_place,
    say_way,
)
from .text import escape


def tell_smoke_faults(score: SmokeFaultScore) -> list[str]:
    """Sentences, whatever is not right, the table of every fault, and the runs without one."""
    lines = [escape(" ".join(filter(None, (say_caught(score), say_alarms(score), say_lacking(score))))), ""]
    if not score.judged:
        return lines
    lines += [escape(f"{score.environment}, target {score.target}; {score.seconds:.0f} s."), ""]
    lines += [f"- **{escape(row.fault)}**: {escape(row.says)} {escape(row.reason)}." for row in find_unsettled(score)]
    lines += [""] if find_unsettled(score) else []
    rows = [(row.fault, row.says, name_verdict(row), name_check(row.caught_by), say_named(row)) for row in score.faults]
    places = [(row.fault, say_place(row), say_others(row)) for row in score.faults]
    clean = [(run.title, say_way(run.way), say_clean(run)) for run in score.clean]
    return [
        *lines,
        *_draw(HEADINGS, rows),
        "",
        "<details><summary>Where each is planted, what other checks said, and the runs without a fault</summary>",
        "",
        *_draw(PLACE_HEADINGS, places),
        "",
        *_draw(CLEAN_HEADINGS, clean),
        "",
        "</details>",
    ]


def _draw(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    return lines + [f"| {' | '.join(map(escape, row))} |" for row in rows]
