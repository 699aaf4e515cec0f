"""How a verdict looks: symbols, letters and words; the colour is never the only sign."""

from __future__ import annotations

from typing import NamedTuple, assert_never

from megacpp_validate.evidence.findings import Impact, ModuleVerdict
from megacpp_validate.evidence.firewall import FirewallOutcome


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
