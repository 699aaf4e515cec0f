"""What is said of pins, of locks, and of whether a stack fits."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ...images.fit_result import Fit, FitVerdict, StackFit
from ...images.lock_result import LockLine, LockResult, PackageLine, PinLine, PinNews
from ..marks import Mark
from ..summaries import count

_PINS: Final = {
    PinNews.SAME: Mark("✓", "-", "verified", "good"),
    PinNews.NEW: Mark("+", "+", "new, verified", "good"),
    PinNews.ACCEPTED: Mark("▲", "!", "changed, accepted", "risk"),
    PinNews.CHANGED: Mark("✗", "X", "changed: refused", "bad"),
    PinNews.KEPT: Mark("·", ".", "kept", "quiet"),
    PinNews.CLAIMED: Mark("○", "?", "new, as others say", "risk"),
    PinNews.MISSING: Mark("✗", "X", "no digest", "bad"),
}
_FITS: Final = {
    FitVerdict.REFUSED: Mark("✗", "X", "does not fit", "bad"),
    FitVerdict.UNKNOWN: Mark("○", "?", "not known", "risk"),
    FitVerdict.WARNED: Mark("▲", "!", "fits with less", "risk"),
    FitVerdict.FITS: Mark("✓", "-", "fits", "good"),
}
_FRESH: Final = Mark("✓", "-", "as it should be", "good")
_STALE: Final = Mark("▲", "!", "to be written", "risk")


def mark_pin(line: PinLine) -> Mark:
    """How the news of a pin looks."""
    return _PINS[line.news]


def mark_fit(verdict: FitVerdict) -> Mark:
    """How a verdict looks."""
    return _FITS[verdict]


def mark_lock(line: LockLine) -> Mark:
    """Whether a lock is what the matrix says."""
    return _STALE if line.stale else _FRESH


def summarize_lock(result: LockResult) -> str:
    """The answer in a sentence."""
    if result.refusals:
        return f"Nothing was written: {count(len(result.refusals), 'refusal')}."
    unverified = [line.base for line in result.pins if not line.verified]
    tail = f" No registry has verified the digest of {', '.join(unverified)} yet." if unverified else ""
    if result.check:
        stale = [line.file for line in result.locks if line.stale]
        stale += [f"the pin of {line.base}" for line in result.pins if line.news is PinNews.MISSING]
        if stale:
            return f"Older than the matrix: {', '.join(stale)}.{tail} Next step: `nox -s lock`."
        return f"Pins and locks are what the matrix says.{tail}"
    missing = [line.base for line in result.pins if line.news is PinNews.MISSING]
    if missing:
        tail = (
            f" There is no digest of {', '.join(missing)}: no registry answered, and nobody says anything of it. Next "
            "step: run it where one answers, or name a mirror (MEGACPP_REGISTRY_MIRROR)."
        )
    if not result.written:
        return f"Nothing to write{'' if missing else ': pins and locks are what they were'}.{tail}"
    return f"Written: {', '.join(result.written)}.{tail}"


def say_pin(line: PinLine) -> str:
    """From which digest to which, and how it is known."""
    how = f"{line.how} on {line.verified}" if line.verified else line.how
    how += f". This time: {line.silence}" if line.silence else ""
    if line.news is PinNews.CHANGED or (line.before and line.before != line.after):
        return f"{line.before or 'none'} became {line.after or 'none'}; {how}"
    return f"{line.after or 'none'}; {how}"


def say_lock(line: LockLine) -> str:
    """How many packages, and what changes in them."""
    counts = Counter(_kind(package) for package in line.packages)
    changes = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    why = f"; {line.stale}" if line.stale else ""
    return f"{count(line.count, 'package')}{f', {changes}' if changes else ''}{why}"


def say_package(line: PackageLine) -> str:
    """What changes of a package."""
    match _kind(line):
        case "added":
            return f"+ {line.name} {line.after}"
        case "removed":
            return f"- {line.name} {line.before}"
        case "other files":
            return f"~ {line.name} {line.after}: from other files"
        case _:
            return f"~ {line.name} {line.before} -> {line.after}"


def summarize_fit(stack: StackFit) -> str:
    """Whether a stack fits, in a sentence."""
    if not stack.te:
        return f"{stack.name}: no Transformer Engine in it, and nothing to fit."
    counts = Counter(fit.verdict for fit in stack.fits)
    words = [f"{counts[verdict]} {_FITS[verdict].word}" for verdict in FitVerdict if counts[verdict]]
    answer = "does not fit" if stack.refused else "is not refused" if counts[FitVerdict.UNKNOWN] else "fits"
    return f"{stack.name}: Transformer Engine {stack.te} {answer}: {', '.join(words) or 'nothing is known of it'}."


def say_fit(fit: Fit) -> str:
    """One need and what is there."""
    return f"{fit.component} {fit.seen}, wanted {fit.wanted}: {fit.says}"


def _kind(line: PackageLine) -> str:
    if not line.before:
        return "added"
    if not line.after:
        return "removed"
    return "other files" if line.files else "changed"
