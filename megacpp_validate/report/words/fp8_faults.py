"""The score of the FP8 cells in words, for every form that tells it."""

from __future__ import annotations

from typing import Final

from ...canary.dynamic.fp8_fault_score import CellSeen, Fp8FaultResult, Fp8FaultScore, Fp8Verdict

HEADINGS: Final = ("fault", "release", "what is planted", "verdict", "red, by", "green")
_SHOWN: Final = 3  # checks of a cell that are named
_WORDS: Final[dict[Fp8Verdict, str]] = {
    Fp8Verdict.CAUGHT: "caught",
    Fp8Verdict.BY_ANOTHER: "seen by another check",
    Fp8Verdict.MISSED: "missed",
    Fp8Verdict.NOT_PLANTED: "not planted",
    Fp8Verdict.NOT_RUN: "not run",
}


def say_caught(score: Fp8FaultScore) -> str:
    """The score in a sentence."""
    judged = len(score.judged)
    if not judged:
        return f"No fault was judged: {score.environment.rstrip('.')}."
    held = "held-out " if score.held_out else ""
    return (
        f"FP8: {score.caught} of {judged} {held}faults planted in Transformer Engine are caught by a check that must "
        f"see them ({score.caught / judged:.1%}; 95% Wilson lower bound {score.caught_bound:.1%}), "
        f"{score.seen} by any check (lower bound {score.seen_bound:.1%})."
    )


def say_alarms(score: Fp8FaultScore) -> str:
    """What the cells off the path gave, in a sentence."""
    if not score.quiet:
        return "No cell off the path of a fault ran."
    return (
        f"Cells off the path: {score.alarms} of {len(score.quiet)} turned red (95% Wilson upper bound "
        f"{score.alarm_bound:.1%})."
    )


def say_lacking(score: Fp8FaultScore) -> str:
    """What was asked for and did not run; empty where nothing is missing."""
    lacking = len(score.faults) - len(score.judged)
    return f"Not judged: {lacking} of {len(score.faults)} faults." if lacking and score.judged else ""


def find_unsettled(score: Fp8FaultScore) -> list[Fp8FaultResult]:
    """Faults that the right check did not see, or that something else turned red by."""
    return [row for row in score.faults if row.verdict is not Fp8Verdict.CAUGHT or row.is_alarm]


def say_verdict(row: Fp8FaultResult) -> str:
    """What became of a fault."""
    word = _WORDS[row.verdict]
    return f"{word}: {row.reason}" if row.reason else word


def name_verdict(row: Fp8FaultResult) -> str:
    """What became of a fault, in a word or two."""
    return f"{_WORDS[row.verdict]}{', with an alarm' if row.is_alarm else ''}"


def say_seen(row: Fp8FaultResult) -> str:
    """Which checks of which cells saw it; those that must first."""
    return "; ".join(_say_cell(cell) for cell in row.cells)


def say_green(row: Fp8FaultResult) -> str:
    """The cell that must stay green."""
    if row.green is None or row.green.outcome is None:
        return ""
    return f"{row.green.cell}: {row.green.outcome.value}"


def _say_cell(cell: CellSeen) -> str:
    if cell.outcome is None:
        return f"{cell.cell}: no receipt"
    failed = [*cell.right, *cell.others]
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return f"{cell.cell}: {', '.join(failed[:_SHOWN]) or cell.outcome.value}{more}"
