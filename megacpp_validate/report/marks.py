"""How a verdict looks: symbols, letters and words; the colour is never the only sign."""

from __future__ import annotations

from typing import Final, NamedTuple

from megacpp_validate.evidence.receipt import Outcome


class Mark(NamedTuple):
    """A symbol, a letter where symbols cannot be shown, a word, and a tone for the colour."""

    symbol: str
    letter: str
    word: str
    tone: str


_CELLS: Final = {
    Outcome.PASS: Mark("✓", "-", "pass", "good"),
    Outcome.FAIL: Mark("✗", "X", "fail", "bad"),
    Outcome.ERROR: Mark("✗", "X", "error", "bad"),
    Outcome.IMPORT_ERROR: Mark("✗", "X", "import error", "bad"),
    Outcome.BLOCKED: Mark("↳", ">", "blocked", "bad"),
    Outcome.EXPECTED_UNSUPPORTED: Mark("·", ".", "unsupported", "quiet"),
    Outcome.TIMEOUT: Mark("✗", "X", "timeout", "bad"),
    Outcome.NOT_RUN: Mark("○", "?", "not run", "risk"),
}


def mark_cell(outcome: Outcome) -> Mark:
    """How the outcome of a probe looks."""
    return _CELLS[outcome]
