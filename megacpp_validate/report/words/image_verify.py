"""What is said of an image that was verified."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ...images.verify_result import CheckOutcome, ImageVerdict
from ..marks import Mark
from ..summaries import count

_MARKS: Final = {
    CheckOutcome.FAIL: Mark("✗", "X", "fails", "bad"),
    CheckOutcome.NOT_RUN: Mark("○", "?", "not run", "risk"),
    CheckOutcome.PASS: Mark("✓", "-", "passes", "good"),
}


def mark_check(outcome: CheckOutcome) -> Mark:
    """How a check of an image looks."""
    return _MARKS[outcome]


def summarize_image(verdict: ImageVerdict) -> str:
    """The answer in a sentence."""
    counts = Counter(check.outcome for check in verdict.checks)
    failed = [check.name for check in verdict.checks if check.outcome is CheckOutcome.FAIL]
    missing = [check.name for check in verdict.checks if check.outcome is CheckOutcome.NOT_RUN]
    words = [f"{count(counts[CheckOutcome.PASS], 'check')} of {len(verdict.checks)} pass"]
    words += [f"failed: {', '.join(failed)}"] if failed else []
    words += [f"not run, so nobody knows: {', '.join(missing)}"] if missing else []
    return f"{'; '.join(words)}."


def say_packages(verdict: ImageVerdict) -> str:
    """What is inside, by kind; empty where no list was read."""
    kinds = ", ".join(f"{number} {kind}" for kind, number in verdict.packages.items())
    return f"inside: {kinds}; {len(verdict.unknown_licences)} say no licence" if kinds else ""
