"""How a verdict looks: symbols, letters and words; the colour is never the only sign."""

from __future__ import annotations

from typing import Final, NamedTuple, assert_never

from megacpp_validate.evidence.receipt import Outcome

from ..canary.firewall.result import FirewallOutcome
from ..canary.static.findings import Impact, ModuleVerdict


class Mark(NamedTuple):
    """A symbol, a letter where symbols cannot be shown, a word, and a tone for the colour."""

    symbol: str
    letter: str
    word: str
    tone: str


def mark_verdict(verdict: ModuleVerdict) -> Mark:
    """How the verdict on a bridge module looks."""
    match verdict:
        case ModuleVerdict.BREAKS:
            return Mark("✗", "X", "breaks", "bad")
        case ModuleVerdict.CASCADE:
            return Mark("↳", ">", "breaks with its cause", "bad")
        case ModuleVerdict.RISK:
            return Mark("▲", "!", "at risk", "risk")
        case ModuleVerdict.CLEAN:
            return Mark("✓", "-", "clean", "good")
        case _:
            assert_never(verdict)


def mark_impact(impact: Impact) -> Mark:
    """How the impact of a finding looks."""
    match impact:
        case Impact.BREAKING:
            return Mark("✗", "X", "breaking", "bad")
        case Impact.RISK:
            return Mark("▲", "!", "risk", "risk")
        case Impact.HARMLESS:
            return Mark("·", ".", "harmless", "quiet")
        case _:
            assert_never(impact)


def mark_outcome(outcome: FirewallOutcome) -> Mark:
    """How the outcome of a firewall case looks."""
    match outcome:
        case FirewallOutcome.PASS:
            return Mark("✓", "-", "holds", "good")
        case FirewallOutcome.FAIL:
            return Mark("✗", "X", "fails", "bad")
        case FirewallOutcome.NOT_RUN:
            return Mark("○", "?", "not run", "risk")
        case _:
            assert_never(outcome)


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
