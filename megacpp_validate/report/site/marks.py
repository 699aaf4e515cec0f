"""Marks that only the pages of a site show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from megacpp_validate.evidence.receipt import Backend, Outcome
from megacpp_validate.evidence.selftest import Fate, MutantResult

from ...canary.dynamic.upgrade_result import StepResult, TimingChange
from ..marks import Mark, mark_cell
from ..words.selftest import ModuleScore
from ..words.upgrade import find_unseen
from .trends import Trend
from .values import CellHistory

FILE_LOST: Final = Mark("○", "?", "file lost", "risk")
NOT_READ: Final = Mark("○", "?", "no evidence", "risk")
SECOND_COPY: Final = Mark("▲", "!", "second copy", "risk")
AHEAD: Final = Mark("▲", "!", "clock ahead", "risk")
CONTRADICTED: Final = Mark("▲", "!", "contradicted", "risk")
COPIED: Final = Mark("·", ".", "copy", "quiet")
OUTDATED: Final = Mark("▲", "!", "outdated", "risk")
_LOOK_AT: Final = 1.1  # a trend above this ratio says "more"; nothing is decided by it


def mark_history(cell: CellHistory) -> Mark:
    """How a cell looks: as its newest receipt, unless another one puts it in doubt."""
    if cell.newest.lost:
        return FILE_LOST
    return mark_doubt(cell.newest.outcome, cell.doubt)


def mark_doubt(outcome: Outcome, doubt: str) -> Mark:
    """How an outcome looks that something puts in doubt, which is never good: `doubt` says what, empty if nothing."""
    mark = mark_cell(outcome)
    if not doubt:
        return mark
    word = f"{mark.word}, {doubt}"
    return Mark("▲", "!", word, "risk") if outcome.is_good else mark._replace(word=word)


def mark_step(step: StepResult) -> Mark:
    """How the step between two stacks looks."""
    if step.breaks:
        slow = all(culprit.is_slowdown for culprit in step.culprits)
        return Mark("▲", "!", "slower", "risk") if slow else Mark("✗", "X", "breaks", "bad")
    return NOT_READ if step.lost or find_unseen(step) else Mark("✓", "-", "breaks nothing", "good")


def mark_timing(row: TimingChange) -> Mark:
    """How a use that was timed on both sides looks."""
    if row.slower:
        return Mark("✗", "X", "slower", "bad")
    return Mark("✓", "-", "within noise", "good") if row.noise else Mark("○", "?", "not compared", "quiet")


def mark_trend(trend: Trend) -> Mark:
    """How the newest value of a trend looks beside those before."""
    if trend.ratio > _LOOK_AT:
        return Mark("▲", "!", "more", "risk")
    return Mark("▼", "-", "less", "quiet") if trend.ratio < 1 / _LOOK_AT else Mark("·", ".", "the same", "quiet")


def mark_backend(backend: Backend, fell_back: Sequence[Backend]) -> Mark:
    """How a path looks that asked for one backend and took another, or the same.

    Args:
        fell_back: paths of its receipt that took what they should not, by what they claim or by what was seen.
    """
    if backend in fell_back:
        return Mark("↳", ">", "fell back", "risk")
    if backend.requested and backend.requested != backend.claimed:
        return Mark("·", ".", "another, as it may", "quiet")
    return Mark("✓", "-", "as requested", "good")


def mark_score(score: ModuleScore) -> Mark:
    """How the mutants of one module fared."""
    if not score.mutants:
        return Mark("○", "?", "not run", "risk")
    whole = score.mutants == score.killed == score.blamed_rightly
    return Mark("✓", "-", "all killed", "good") if whole else Mark("✗", "X", "not all", "bad")


def mark_fate(row: MutantResult) -> Mark:
    """How one mutant fared."""
    if row.fate is not Fate.KILLED:
        return Mark("✗", "X", row.fate.value, "bad")
    if row.blamed_rightly:
        return Mark("✓", "-", "killed", "good")
    return Mark("▲", "!", "killed, wrong blame", "risk")
